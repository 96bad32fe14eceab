"""What tracing on fake CUDA tensors sees of a training step; every test runs in the child process."""

from __future__ import annotations

import re

import pytest
from fixtures.waiting import wait_until

from batchtune.errors import BatchtuneError
from batchtune.estimate.commands import PROGRAM
from batchtune.processes.local import LocalLauncher
from batchtune.processes.worker import Worker

MLP = """
    def build_model():
        return nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 1024, bias=False))

    def make_batch(size):
        return torch.randn(size, 1024)

    def compute_loss(model, batch):
        return model(batch).square().mean()
"""
WEIGHTS = 2 * 1024 * 1024 * 4
ATTENTION = """
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x):
            q, k, v = self.qkv(x).view(x.shape[0], 2048, 3, 1, 64).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    def build_model():
        return Attention()

    def make_batch(size):
        return torch.randn(size, 2048, 64)

    def compute_loss(model, batch):
        return model(batch).square().mean()
"""


def test_parameters_gradients_and_adam_states_are_told_apart(ask):
    detail = ask(MLP, memory_limit=200 << 20)["details"][0]
    assert detail["parameters_bytes"] == WEIGHTS
    assert detail["optimizer_states_bytes"] >= 2 * WEIGHTS
    assert max(point["allocated_bytes"] for point in detail["curve"]) == detail["peak_allocated_bytes"]
    moments = list(dict.fromkeys(point["moment"] for point in detail["curve"]))
    assert moments == [
        "build",
        *(f"{phase} {step}" for step in (1, 2) for phase in ("forward", "backward", "optimizer")),
    ]


def test_what_holds_the_most_activations_is_named_with_its_line(ask):
    wide = MLP.replace("torch.randn(size, 1024)", "torch.randn(size, 256, 1024)")
    held = ask(wide, memory_limit=1 << 30)["details"][0]["holders"]
    assert {each["module"] for each in held} >= {"* (Linear)", "* (ReLU)"}
    assert held[0]["line"].endswith("task.py:11")
    assert held[0]["activation_bytes"] == max(each["activation_bytes"] for each in held)
    inner = ask(wide.replace("nn.ReLU()", "nn.Sequential(nn.ReLU())"), memory_limit=1 << 30)["details"][0]["holders"]
    assert {each["module"] for each in inner} >= {"* (Linear)", "*.* (ReLU)"}


def test_what_the_batch_holds_is_not_said_to_be_the_losss(ask):
    reading = MLP.replace("nn.ReLU()", "nn.Identity()").replace("batch).square()", "batch).sum(1)")
    held = {each["module"]: each for each in ask(reading, memory_limit=200 << 20)["details"][0]["holders"]}
    assert "line" not in held["batch and loss"]
    assert not any(each.get("line", "").startswith("<") for each in held.values())


def test_a_device_that_the_code_chose_where_it_saw_no_gpu_is_a_gpus(ask):
    chosen = """
    DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    """
    loss = "return (model(batch) * torch.ones(1024, device=DEVICE)).square().mean()"
    found = ask(chosen + MLP.replace("return model(batch).square().mean()", loss), memory_limit=200 << 20)
    plain = ask(MLP.replace("return model(batch).square().mean()", loss.replace("DEVICE", "batch.device")))
    assert any("DEVICE: taken to be cuda" in note for note in found["gpus"][0]["notes"])
    assert found["gpus"][0]["max_batch_size"] > 0
    assert "refused" not in plain


def test_a_chosen_device_is_the_cpu_where_batches_are_made_and_where_it_does_not_help(ask):
    chosen = """
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
    """
    mlp = MLP.replace("torch.randn(size, 1024)", "torch.randn(size, 1024, device=DEVICE)")
    loss = "return model(batch).square().mean()"
    made = mlp.replace(loss, "return (model(batch) * torch.ones(1024, device=DEVICE)).square().mean()")
    found = ask(chosen + made, memory_limit=200 << 20)
    assert any("DEVICE: taken to be cuda" in note for note in found["gpus"][0]["notes"])
    mixed = ask(chosen + mlp.replace(loss, "return (model(batch) * torch.ones(1024)).square().mean()"))
    assert "tensors are on different devices, cuda:0 and cpu" in str(mixed)


def test_weights_that_a_model_solves_for_when_it_is_made_are_traced(ask):
    solved = """
    class Spline(nn.Module):
        def __init__(self):
            super().__init__()
            found = torch.linalg.lstsq(torch.randn(16, 9, 4), torch.randn(16, 9, 8)).solution
            self.weight = nn.Parameter(found.permute(2, 0, 1).contiguous())

        def forward(self, x):
            return torch.einsum("bi,oik->bok", x, self.weight)

    def build_model():
        return Spline()

    def make_batch(size):
        return torch.randn(size, 16)

    def compute_loss(model, batch):
        return model(batch).square().mean()
    """
    detail = ask(solved, memory_limit=200 << 20)["details"][0]
    assert detail["parameters_bytes"] == 8 * 16 * 4 * 4


def test_metrics_of_the_training_step_are_on_the_device_and_look_at_no_values(ask):
    pytest.importorskip("torchmetrics")
    measured = """
    class Measured(nn.Module):
        def __init__(self):
            from torchmetrics import Accuracy, MeanMetric

            super().__init__()
            self.net = nn.Linear(16, 4)
            self.mean, self.accuracy = MeanMetric(), Accuracy(task="multiclass", num_classes=4)

        def forward(self, x):
            return self.net(x)

    def build_model():
        return Measured()

    def make_batch(size):
        return torch.randn(size, 16), torch.randint(4, (size,))

    def compute_loss(model, batch):
        scores = model(batch[0])
        loss = nn.functional.cross_entropy(scores, batch[1])
        model.mean(loss)
        model.accuracy(scores.argmax(1), batch[1])
        return loss
    """
    answer = ask(measured, memory_limit=200 << 20)
    assert "refused" not in answer
    assert answer["gpus"][0]["max_batch_size"] > 0


def test_sgd_keeps_no_states(ask):
    source = MLP + "\n    def build_optimizer(model, lr):\n        return torch.optim.SGD(model.parameters(), lr=lr)\n"
    detail = ask(source, memory_limit=200 << 20)["details"][0]
    assert detail.get("optimizer_states_bytes", 0) == 0


def test_foreach_and_fused_adam_differ_in_their_temporaries(ask):
    def peak(extra):
        source = (
            MLP
            + f"""
    def build_optimizer(model, lr):
        return torch.optim.AdamW(model.parameters(), lr=lr, {extra})
"""
        )
        row = ask(source, memory_limit=1 << 20)["gpus"][0]
        return row["needed_bytes"]

    assert peak("") == peak("foreach=True")
    assert peak("fused=True") + WEIGHTS // 2 < peak("foreach=True")


@pytest.mark.parametrize(
    ("layer", "same"),
    [("nn.SiLU()", "nn.GELU()"), ("nn.Mish()", "nn.GELU()"), ("nn.RMSNorm(64)", "nn.LayerNorm(64)")],
)
def test_what_cuda_runs_as_one_kernel_keeps_nothing_of_its_parts(ask, layer, same):
    source = """
        def build_model():
            return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), LAYER) for _ in range(4)])

        def make_batch(size):
            return torch.randn(size, 256, 64)

        def compute_loss(model, batch):
            return model(batch).square().mean()
    """

    def kept(of):
        detail = ask(source.replace("LAYER", of), memory_limit=2 << 30)["details"][0]
        return detail["activations_bytes"] / detail["batch_size"]

    assert kept(layer) == pytest.approx(kept(same), rel=0.01)


def test_gradients_outlive_the_first_of_two_micro_batches(ask):
    wide = MLP.replace("torch.randn(size, 1024)", "torch.randn(size, 4096, 1024)")
    one = ask(wide, memory_limit=1 << 20)["gpus"][0]["needed_bytes"]
    two = ask(wide, memory_limit=1 << 20, accumulation_steps=2)["gpus"][0]["needed_bytes"]
    assert two >= one + WEIGHTS


def test_flash_attention_keeps_no_scores_and_a_mask_takes_the_efficient_kernel(ask):
    scores = 2048 * 2048 * 4
    masked = ATTENTION.replace("(q, k, v)", "(q, k, v, attn_mask=x.new_ones(2048, 2048).tril().bool())")
    for source in (ATTENTION, masked):
        small = ask(source, "bf16", memory_limit=400 << 20)["gpus"][0]
        assert small["max_batch_size"] * scores > 400 << 20
        assert small["confidence"].startswith("high")


def test_inference_keeps_no_scores_either_but_where_the_user_chooses_the_kernel_that_does(ask):
    """Torch's inference mode hides from a trace what is inside of attention."""
    limit, scores = 400 << 20, 2048 * 2048 * 2
    with_math = "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): return nn"
    math = ATTENTION.replace("return nn", with_math)
    flash, kept = (ask(text, "bf16", memory_limit=limit, inference=True)["gpus"][0] for text in (ATTENTION, math))
    assert kept["max_batch_size"] * scores < limit < flash["max_batch_size"] * scores


def test_an_encoder_in_inference_is_traced_without_the_fast_path_whose_memory_nobody_sees(ask):
    encoder = """
    def build_model():
        layer = nn.TransformerEncoderLayer(64, 4, 512, batch_first=True)
        return nn.ModuleDict({"words": nn.Embedding(100, 64), "encoder": nn.TransformerEncoder(layer, 2)})

    def make_batch(size):
        return torch.randint(0, 100, (size, 128))

    def compute_loss(model, batch):
        return model["encoder"](model["words"](batch), src_key_padding_mask=batch.eq(0)).square().mean()
    """
    limit, widest = 400 << 20, 128 * 512 * 4
    found = ask(encoder, memory_limit=limit, inference=True)["gpus"][0]
    assert 0 < found["max_batch_size"] * widest < limit
    assert found["confidence"].startswith("low")


def test_distributions_look_at_no_values_where_there_are_none(ask):
    sampled = MLP.replace("model(batch).square()", "torch.distributions.Normal(model(batch), 1.0).rsample().square()")
    plain = MLP.replace("model(batch).square()", "(model(batch) + torch.randn_like(batch)).square()")
    sizes = [ask(source, memory_limit=1 << 30)["gpus"][0]["max_batch_size"] for source in (sampled, plain)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.3)


def test_checkpointing_halves_what_is_kept(ask):
    deep = """
    from torch.utils.checkpoint import checkpoint

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)
            )

        def forward(self, x):
            for block in self.blocks:
                x = CALL
            return x

    def build_model():
        return Deep()

    def make_batch(size):
        return torch.randn(size, 512, 256)

    def compute_loss(model, batch):
        return model(batch).square().mean()
"""
    plain = ask(deep.replace("CALL", "block(x)"), memory_limit=2 << 30)["gpus"][0]["max_batch_size"]
    kept = ask(deep.replace("CALL", "checkpoint(block, x, use_reentrant=False)"), memory_limit=2 << 30)
    assert kept["gpus"][0]["max_batch_size"] > 2 * plain


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_keeps_activations_in_half(ask, precision):
    wide = MLP.replace("torch.randn(size, 1024)", "torch.randn(size, 256, 1024)")
    wide = wide.replace("nn.ReLU()", "*(nn.ReLU() for _ in range(8))")

    def kept(*precision):
        detail = ask(wide, *precision, memory_limit=2 << 30)["details"][0]
        return detail["activations_bytes"] / detail["batch_size"]

    assert kept(precision) < 0.9 * kept()


def test_rates_read_from_small_tensors_are_real(ask):
    source = MLP.replace("nn.ReLU()", "nn.Dropout([x.item() for x in torch.linspace(0, 0.5, 3)][1])")
    source = source.replace("return model(batch)", "assert model[1].p == 0.25; return model(batch)")
    answer = ask(source)
    assert answer["gpus"][0]["notes"] == []


def test_a_value_that_is_read_is_named_with_its_line_and_lowers_the_confidence(ask):
    source = MLP.replace("return model(batch)", "model(batch).sum().item(); return model(batch)")
    row = ask(source)["gpus"][0]
    assert row["confidence"].startswith("medium")
    assert any("task.py:11: reads a tensor's value" in note for note in row["notes"])


def test_a_selection_by_mask_is_estimated_as_if_everything_were_selected(ask):
    source = MLP.replace("return model(batch)", "out = model(batch); return out[out > 0]")
    row = ask(source)["gpus"][0]
    assert row["confidence"].startswith("low")
    assert any("upper bound" in note and "task.py:11" in note for note in row["notes"])


def test_sparse_tensors_are_refused_with_what_measures_them(ask):
    source = MLP.replace("return model(batch)", "return model(batch) + torch.eye(4).to_sparse().to(batch.device).sum()")
    assert "for such tensors (sparse ones, say); probe measures them" in ask(source)["refused"]


SPARSE = """
    def build_model():
        return nn.LAYER(1000, 64, sparse=True)

    def build_optimizer(model, lr):
        return torch.optim.OPTIMIZER(list(model.parameters()), lr=lr)

    def make_batch(size):
        return torch.zeros(size, 8, dtype=torch.long)

    def compute_loss(model, batch):
        return model(batch).square().mean()
"""


@pytest.mark.parametrize("layer", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize(("optimizer", "level"), [("SGD", "high"), ("SparseAdam", "low"), ("Adagrad", "low")])
def test_sparse_gradients_are_counted_as_if_no_row_were_twice_in_a_batch(ask, layer, optimizer, level):
    answer = ask(SPARSE.replace("LAYER", layer).replace("OPTIMIZER", optimizer), memory_limit=64 << 20)
    row, detail = answer["gpus"][0], answer["details"][0]
    assert row["confidence"].startswith(level)
    assert any("no row is taken to be twice" in note for note in row["notes"]) is (level == "low")
    if optimizer == "SparseAdam":  # holds the gradient, what it is without rows twice, and five more of its size
        assert detail["peak_moment"].startswith("optimizer")
        assert row["max_batch_size"] * 7 * 8 * 64 * 4 < 64 << 20
        assert detail["gradients_bytes"] == detail["batch_size"] * 8 * 64 * 4


def test_sparse_gradients_of_two_micro_batches_are_added_up(ask):
    row = ask(SPARSE.replace("LAYER", "Embedding").replace("OPTIMIZER", "SGD"), accumulation_steps=2)["gpus"][0]
    assert row["max_batch_size"] > 1


@pytest.mark.parametrize(
    ("question", "level"),
    [
        ("torch.equal(batch, batch)", "high"),
        ("not torch.equal(batch, batch[:1])", "high"),
        ("torch.equal(torch.arange(3), torch.arange(3))", "high"),
        ("torch.allclose(torch.ones(3, device=batch.device), torch.ones(3, device=batch.device) + 1e-9)", "high"),
        ("not torch.equal(batch, batch + 1)", "low"),
        ("not torch.allclose(batch, batch + 1)", "low"),
    ],
)
def test_whether_tensors_are_equal_follows_from_shapes_and_known_values_or_is_assumed(ask, question, level):
    row = ask(MLP.replace("return model(batch)", f"assert {question}; return model(batch)"))["gpus"][0]
    assert row["confidence"].startswith(level)
    assert any("task.py:11: branches on a tensor's value" in note for note in row["notes"]) is (level == "low")


def test_values_that_numpy_reads_are_zeros_of_their_shape_with_the_line(ask):
    code = """
        costs = model(batch).detach().cpu()
        import numpy
        assert numpy.asarray(costs[:, :4]).shape == (len(batch), 4)
        rows = torch.as_tensor(costs.numpy().argmin(1))
        return model(batch)[:, rows]"""
    row = ask(MLP.replace("return model(batch)", code))["gpus"][0]
    assert row["confidence"].startswith("low")
    assert any("task.py:14: NumPy reads a tensor's values" in note for note in row["notes"])
    known = "assert torch.arange(3).numpy().tolist() == [0, 1, 2]; return model(batch)"
    assert ask(MLP.replace("return model(batch)", known))["gpus"][0]["confidence"].startswith("high")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("model(batch).numpy()", "Tensor that requires grad"),
        ("batch.numpy()", "can't convert cuda:0 device type tensor to numpy"),
    ],
)
def test_what_numpy_cannot_have_on_a_gpu_is_the_users_error(ask, code, said):
    answer = ask(MLP.replace("return model(batch)", f"{code}; return model(batch)"))
    assert said in answer["refused"]
    assert "without data" not in answer["refused"]


@pytest.mark.parametrize(
    "code", ["torch.bincount(model(batch).long().flatten())", "torch.tensor(list(batch[0].cpu()))"]
)
def test_what_needs_data_is_refused_with_its_line(ask, code):
    source = MLP.replace("return model(batch)", f"{code}; return model(batch)")
    assert "task.py:11: cannot be traced without data" in ask(source)["refused"]


def test_indices_that_an_operator_only_reads_stay_known(ask):
    code = """
        rows = torch.arange(len(batch), device=batch.device)
        summed = torch.zeros_like(batch).index_add_(0, rows, model(batch))
        assert rows.max() == len(batch) - 1
        return summed"""
    assert ask(MLP.replace("return model(batch)", code))["gpus"][0]["confidence"].startswith("high")


def test_a_copy_of_a_module_that_has_buffers_is_traced(ask):
    """A frozen teacher, say: buffers are copied in another way than parameters."""
    copied = """
    import copy

    TEACHER = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))

    def build_model():
        return copy.deepcopy(TEACHER)

    def make_batch(size):
        return torch.randn(size, 64)

    def compute_loss(model, batch):
        return model(batch).square().mean()
    """
    made = copied.replace("copy.deepcopy(TEACHER)", "nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))")
    found, anew = (ask(text, memory_limit=200 << 20)["details"][0] for text in (copied, made))
    assert found["peak_allocated_bytes"] == anew["peak_allocated_bytes"]


def test_a_copy_that_build_model_makes_is_traced_as_the_model_is(ask):
    """An average of its weights, say: a copy of tensors of another mode crashed torch, not in every process."""
    averaged = """
    import copy

    def build_model():
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
        average = copy.deepcopy(model)
        pairs = zip([*average.parameters(), *average.buffers()], [*model.parameters(), *model.buffers()])
        assert all(new.fake_mode is old.fake_mode for new, old in pairs)
        return {"model": model, "average": average}

    def make_batch(size):
        return torch.randn(size, 64)

    def compute_loss(model, batch):
        return model["model"](batch).square().mean()
    """
    single = averaged.replace("copy.deepcopy(model)", "model")
    twice, once = (ask(text, memory_limit=200 << 20)["details"][0]["parameters_bytes"] for text in (averaged, single))
    assert twice == pytest.approx(2 * once, abs=8)  # the count of batches stays on the CPU


def test_lazy_modules_are_refused_with_what_to_write(ask):
    assert (
        "such as nn.LazyLinear, are made from data: give them their sizes"
        in ask(MLP.replace("nn.Linear(1024, ", "nn.LazyLinear("))["refused"]
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "return nn.functional.cross_entropy(model(batch), WEIGHTS[:1].long().expand(len(batch)), WEIGHTS)",
            r"compute_loss raised RuntimeError in a fp32 step .*task\.py:\d+: tensors are on different devices",
        ),
        (
            "return nn.functional.embedding(model(batch), model[2].weight).mean()",
            r"compute_loss raised RuntimeError in a fp32 step of batch size 3: .*task\.py:\d+: .*torch.float32",
        ),
        ("raise ValueError('no such label')", r"compute_loss raised ValueError .*task\.py:\d+: no such label"),
    ],
    ids=["a loss left on the CPU", "dtypes", "their own"],
)
def test_what_fails_with_data_too_is_the_users_error_with_its_line(ask, line, said):
    answer = ask(MLP.replace("return model(batch).square().mean()", line) + "\n    WEIGHTS = torch.ones(1024)\n")
    assert re.match(said, answer["refused"])
    assert line in answer["frames"]


def test_a_hook_that_returns_a_tensor_is_the_users_error(ask):
    source = """
    def build_optimizer(model, lr):
        optimizer = torch.optim.SGD(model.parameters(), lr)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        return optimizer
    """
    answer = ask(MLP + source)
    assert "must return None or a tuple" in answer["refused"]
    assert "without data" not in answer["refused"]
    assert "FakeTensor" not in answer["refused"]
    assert "frames" in answer


def test_an_error_after_a_value_was_assumed_is_no_error_of_the_users(ask):
    line = "count = int(batch.argmax()) + 1; return nn.functional.mse_loss(model(batch)[:count], batch[:2, :])"
    answer = ask(MLP.replace("return model(batch).square().mean()", line.replace("[:2, :]", "[:2, :7]")))
    assert "cannot be traced without data" in answer["refused"]
    assert "reads a tensor's value, which is not known without data" in answer["refused"]
    assert "frames" not in answer


def test_the_size_of_a_batch_of_graphs_is_read_from_it(ask):
    source = """
    def build_model():
        return nn.Linear(8, 16)

    def make_batch(size):
        return {"nodes": torch.randn(7 * size, 8), "graph": torch.arange(size).repeat_interleave(7),
                "label": torch.zeros(size, dtype=torch.long)}

    def compute_loss(model, batch):
        nodes, count = model(batch["nodes"]), int(batch["graph"].max()) + 1
        pooled = torch.zeros(count, 16, device=nodes.device).index_add(0, batch["graph"], nodes)
        return nn.functional.cross_entropy(pooled, batch["label"])
    """
    row = ask(source, memory_limit=64 << 20)["gpus"][0]
    nodes = 7 * (8 + 16) * 4  # bytes of a sample's nodes and what the model makes of them
    assert (16 << 20) / (4 * nodes) < row["max_batch_size"] < (64 << 20) / nodes
    assert row["confidence"].startswith("medium")
    assert "the step depends on whole numbers in the batch: as they are in the worst one" in row["notes"]


def test_values_that_a_batch_object_brings_are_picked_on_the_device(ask):
    source = """
    class Graph:
        def __init__(self, x, order):
            self.x, self.order = x, order

        def to(self, device, **_):
            return Graph(self.x.to(device), self.order.to(device))

    def build_model():
        return nn.Linear(8, 16)

    def make_batch(size):
        return Graph(torch.randn(size, 8), torch.arange(size))

    def batch_size_of(graph):
        return len(graph.x)

    def compute_loss(model, graph):
        gathered = torch.zeros_like(graph.x).index_add(0, graph.order, graph.x[graph.order])
        return model(gathered).square().mean()
    """
    assert ask(source)["gpus"][0]["max_batch_size"] > 1


def test_compiled_models_are_traced_as_eager_ones_and_say_so(ask):
    source = MLP.replace("nn.Sequential(", "torch.compile(nn.Sequential(").replace("bias=False))", "bias=False)))")
    row = ask(source)["gpus"][0]
    assert row["confidence"].startswith("medium")
    assert any(
        note.startswith("task.py:5: torch.compile") or "task.py:5: torch.compile" in note for note in row["notes"]
    )


def test_a_compiled_function_is_named_with_its_line(ask):
    source = "\n    @torch.compile\n    def half(x):\n        return x / 2\n" + MLP.replace(
        "model(batch).", "half(model(batch))."
    )
    (note,) = ask(source)["gpus"][0]["notes"]
    assert "task.py:4: torch.compile: traced as eager code" in note


def test_what_a_custom_autograd_function_saves_is_an_activation(ask):
    custom = """
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(SAVED)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2
"""
    wide = MLP.replace("torch.randn(size, 1024)", "torch.randn(size, 4096, 1024)")
    wide = wide.replace("model(batch)", "Scaled.apply(model(batch))")
    without, kept = (
        ask(custom.replace("SAVED", saved) + wide, memory_limit=1 << 20)["gpus"][0]
        for saved in ("", "x.exp(), x.sin(), x.cos()")
    )
    assert kept["needed_bytes"] == without["needed_bytes"] + 3 * 4096 * 1024 * 4
    assert kept["confidence"].startswith("high")


def test_a_loop_that_waits_for_a_value_is_refused_with_its_line_instead_of_going_on_for_ever(ask):
    source = MLP.replace(
        "return model(batch)",
        "x = model(batch).sum()\n        while x.item() < 1: pass\n        return model(batch)",
    )
    refusal = ask(source)["refused"]
    assert "task.py:12: cannot be traced without data" in refusal
    assert "a loop" in refusal


def test_a_branch_on_a_value_is_named_with_its_line_and_lowers_the_confidence_more(ask):
    source = MLP.replace(
        "return model(batch)", "\n        if model(batch).sum() > 0: batch = batch * 2\n        return model(batch)"
    )
    row = ask(source)["gpus"][0]
    assert row["confidence"].startswith("low")
    assert any("task.py:12: branches on a tensor's value" in note for note in row["notes"])


@pytest.mark.parametrize(
    ("library", "expression"),
    [
        ("cuFFT", "torch.fft.rfft(out.float()).abs()"),
        ("cuSOLVER", "torch.linalg.svdvals(out)"),
        ("", "torch.nn.functional.normalize(out, dim=1)"),
    ],
)
def test_libraries_that_take_memory_for_themselves_lower_the_confidence(ask, library, expression):
    row = ask(MLP.replace("return model(batch)", f"out = model(batch); return {expression}"))["gpus"][0]
    assert row["confidence"].startswith("low" if library else "high")
    assert [note for note in row["notes"] if "is not seen" in note] == (
        [f"{library}: the memory inside of it is not seen"] if library else []
    )


RECURRENT = """
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    def build_model():
        return nn.LAYERS

    def make_batch(size):
        return torch.randn(size, 500, 64)

    def compute_loss(model, batch):
        return model(batch)[0].mean()
"""
STEPS = 500


@pytest.mark.parametrize(
    ("layers", "values"),  # that are kept for each hidden unit: input, what cuDNN keeps, output
    [
        ("LSTM(64, 64, 3, batch_first=True)", 1 + 3 * 5 + 2 + 1),
        ("GRU(64, 64, 2, bidirectional=True, batch_first=True)", 1 + 2 * (2 * 6 + 1) + 2),
        ("RNN(64, 64, 1, batch_first=True)", 1 + 2 + 1),
        ("LSTM(64, 64, 1, proj_size=32, batch_first=True)", 1 + 5 + 0.5),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recurrent_layers_are_one_operator_of_cudnn(ask, layers, values, precision):
    answer = ask(RECURRENT.replace("LAYERS", layers), precision, memory_limit=1 << 30)
    row, detail = answer["gpus"][0], answer["details"][0]
    assert row["confidence"].startswith("low (±45%")
    assert any("what cuDNN keeps for backward is taken from one GPU" in note for note in row["notes"])
    units, element = STEPS * detail["batch_size"] * 64, 4 if precision == "fp32" else 2
    held = values * element + (4 if precision == "bf16" else 0)  # the batch as it came, beside its copy
    assert detail["activations_bytes"] == pytest.approx(held * units, rel=0.02)


def test_the_arithmetic_of_recurrent_layers_is_that_of_their_matrices(ask):
    row = ask(RECURRENT.replace("LAYERS", "LSTM(64, 128, 1, batch_first=True)"), memory_limit=1 << 30)["gpus"][0]
    forward = 2 * STEPS * row["max_batch_size"] * 4 * 128 * (64 + 128)
    assert row["work"]["flops"] == 3 * forward  # the gradient of the input, which nobody asks for, is found as well


@pytest.mark.parametrize("bias", [True, False])
def test_weights_of_a_recurrent_layer_are_one_buffer_with_places_for_biases(ask, bias):
    layers = f"LSTM(64, 512, 1, bias={bias}, batch_first=True)"
    answer = ask(RECURRENT.replace("LAYERS", layers).replace("500", "1"), memory_limit=64 << 20)
    detail, matrices, biases = answer["details"][0], 4 * 4 * 512 * (64 + 512), 4 * 4 * 512 * 2
    assert detail["parameters_bytes"] == matrices + biases
    assert detail["gradients_bytes"] == matrices + bias * biases  # without biases each is copied out of the buffer


def test_packed_sequences_are_as_long_as_they_are_padded(ask):
    packed = RECURRENT.replace("LAYERS", "LSTM(64, 64, 1, batch_first=True)").replace(
        "return model(batch)[0].mean()",
        """lengths = torch.full((len(batch),), 500)
        packed = pack_padded_sequence(batch, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(model(packed)[0], batch_first=True)[0].mean()""",
    )
    answer = ask(packed, memory_limit=1 << 30)
    detail = answer["details"][0]
    assert any("packed sequences: all are taken to be as long" in note for note in answer["gpus"][0]["notes"])
    assert detail["activations_bytes"] > STEPS * detail["batch_size"] * 64 * 4 * (1 + 5 + 1)


def test_a_recurrent_layer_in_eval_mode_keeps_nothing_and_does_not_train(ask):
    source = RECURRENT.replace("LAYERS", "LSTM(64, 64, 1, batch_first=True)")
    frozen = source.replace("model(batch)", "model.eval()(batch)")
    assert "cudnn RNN backward can only be called in training mode" in ask(frozen)["refused"]
    answers = [ask(source, memory_limit=1 << 30, inference=inference) for inference in (True, False)]
    without, training = (answer["gpus"][0]["max_batch_size"] for answer in answers)
    assert without > 2 * training


@pytest.mark.parametrize("arguments", ["8, 64, 2, dropout=0.1", "8, 64, 1, bias=False, bidirectional=True"])
def test_a_gru_without_cudnn_keeps_the_workspaces_of_its_cells(ask, arguments):
    source = f"""
    def build_model():
        return nn.GRU({arguments})

    def make_batch(size):
        return torch.randn(4, size, 8)

    def compute_loss(model, batch):
        with torch.backends.cudnn.flags(enabled=False):
            return model(batch)[0].mean()
"""
    answer = ask(source, memory_limit=64 << 20)
    assert answer["gpus"][0]["confidence"].startswith("high")
    states = 4 * 2 * answer["details"][0]["batch_size"] * 64 * 4  # bytes of the hidden states of all cells
    held = answer["details"][0]["activations_bytes"] / states
    assert 5 + 3 + 1 < held < 2 * (5 + 3 + 1)  # of each cell's workspace, input gates and result


CTC = """
    def build_model():
        return nn.Linear(80, 32)

    def make_batch(size):
        return {"frames": torch.randn(size, 400, 80), "targets": TARGETS, "lengths": LENGTHS}

    def compute_loss(model, batch):
        heard = model(batch["frames"]).log_softmax(-1).transpose(0, 1)
        lengths = batch["lengths"]
        frames = lengths.new_full(lengths.shape, 400) if torch.is_tensor(lengths) else [400] * len(lengths)
        return nn.CTCLoss(zero_infinity=True)(heard, batch["targets"], frames, lengths)
"""
PADDED = "torch.randint(1, 32, (size, 50))"


@pytest.mark.parametrize("lengths", ["torch.randint(1, 51, (size,))", "(50,) * size", "[50] * size"])
def test_ctc_is_traced_with_targets_as_long_as_they_are_padded(ask, lengths):
    detail = ask(CTC.replace("TARGETS", PADDED).replace("LENGTHS", lengths), memory_limit=2 << 30)["details"][0]
    alphas = 400 * (2 * 50 + 1) * 4
    assert detail["peak_moment"] == "backward 2"
    assert detail["peak_allocated_bytes"] > 2 * detail["batch_size"] * alphas


@pytest.mark.parametrize(
    ("targets", "lengths", "said"),
    [
        ("torch.randint(1, 32, (size * 50,))", "torch.full((size,), 50)", "targets of CTC one after another"),
        ("torch.ones(size * 50, dtype=torch.int32)", "(50,) * size", "cuDNN's CTC, whose workspace is not known"),
    ],
)
def test_ctc_that_data_decides_is_refused_by_its_name(ask, targets, lengths, said):
    refusal = ask(CTC.replace("TARGETS", targets).replace("LENGTHS", lengths))["refused"]
    assert "task.py:14: cannot be traced without data" in refusal
    assert said in refusal


@pytest.mark.parametrize("bias", [True, False])
def test_an_lstm_without_cudnn_keeps_the_workspaces_of_its_cells_with_biases_or_without(ask, bias):
    source = f"""
    def build_model():
        return nn.LSTM(8, 64, bias={bias})

    def make_batch(size):
        return torch.randn(4, size, 8)

    def compute_loss(model, batch):
        with torch.backends.cudnn.flags(enabled=False):
            return model(batch)[0].mean()
"""
    answer = ask(source, memory_limit=64 << 20)
    states = 4 * answer["details"][0]["batch_size"] * 64 * 4  # bytes of the hidden states of all cells
    assert 3 * 4 < answer["details"][0]["activations_bytes"] / states < 2 * 3 * 4  # two kinds of gates, workspace


def test_an_optimizer_that_steps_only_now_and_then_has_its_states_counted(ask):
    source = """
    def build_model():
        return nn.ModuleDict({"often": nn.Linear(256, 256, bias=False), "seldom": nn.Linear(256, 512, bias=False)})

    def build_optimizer(model, lr):
        return {name: torch.optim.Adam(part.parameters(), lr=lr) for name, part in model.items()}

    def make_batch(size):
        return torch.randn(size, 256)

    def train_step(model, batch, optimizers, context):
        loss = model["often"](batch).square().mean()
        context.backward(loss, optimizers["often"])
        context.step(optimizers["often"])
        turn = context.state["turn"] = context.state.get("turn", 0) + 1
        if turn % 5 == 0:
            context.backward(model["seldom"](batch).square().mean(), optimizers["seldom"])
            context.step(optimizers["seldom"])
        return loss
"""
    states = ask(source, memory_limit=64 << 20)["details"][0]["optimizer_states_bytes"]
    assert states == pytest.approx(2 * 4 * 256 * (256 + 512), rel=0.02)


def test_a_product_by_groups_as_of_experts_is_traced_at_fp32_too(ask):
    source = """
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 64, 256))

        def forward(self, x):
            ends = torch.arange(1, 5, device=x.device, dtype=torch.int32) * (len(x) // 4)
            return torch._grouped_mm(x, self.weight, offs=ends)

    def build_model():
        return nn.Sequential(nn.Linear(16, 64), Experts(), nn.Tanh())

    def make_batch(size):
        return torch.randn(8 * size, 16)

    def compute_loss(model, batch):
        return model(batch).mean()
"""
    answer = ask(source, memory_limit=64 << 20)
    results = 8 * answer["details"][0]["batch_size"] * (64 + 256) * 4  # bytes of the two layers' results
    assert 1 <= answer["details"][0]["activations_bytes"] / results < 2


def test_an_operator_without_a_rule_for_shapes_is_refused_by_its_name(ask):
    asked = "torch.ops.aten._use_cudnn_ctc_loss(model(batch)[None], model(batch), [1], [1], 0)"
    source = MLP.replace("return model(batch)", f"{asked}; return model(batch)")
    assert "torch knows no shape of what aten._use_cudnn_ctc_loss" in ask(source)["refused"]


def test_a_step_that_changes_with_the_batch_falls_back_to_direct_traces(ask):
    source = MLP.replace("torch.randn(size, 1024)", "torch.randn(size, 256, 1024)")
    source = source.replace("return model(batch)", "half = batch[: (len(batch) + 1) // 2]; return model(half)")
    row = ask(source, memory_limit=200 << 20)["gpus"][0]
    assert row["confidence"].startswith("medium")
    assert row["max_batch_size"] > 0
    assert any("scaled" in note for note in row["notes"])


def test_pieces_that_are_larger_than_the_traced_batches_have_the_lowest_confidence(ask):
    code = "return torch.stack([model(piece).square().mean() for piece in batch.split(PIECE)]).sum()"
    source = MLP.replace("return model(batch).square().mean()", code)
    row = ask(source.replace("PIECE", "32"), memory_limit=44 << 20)["gpus"][0]
    assert row["confidence"].startswith("low")
    assert any("pieces of 32, larger than small batches" in note for note in row["notes"])
    whole = ask(MLP, memory_limit=128 << 20)["gpus"][0]
    assert (
        ask(MLP.replace("model(batch)", "model(batch.split(2000, 1)[0])"), memory_limit=128 << 20)["gpus"][0] == whole
    )


def test_tied_weights_stay_tied_and_copies_count(ask):
    tied = MLP.replace("return nn.Sequential(", "model = nn.Sequential(").replace(
        "1024, bias=False))\n", "1024, bias=False))\n        model[2].weight = model[0].weight\n        return model\n"
    )
    detail = ask(tied, memory_limit=200 << 20)["details"][0]
    assert detail["parameters_bytes"] == WEIGHTS // 2
    copied = (
        MLP
        + """
    def build_optimizer(model, lr):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        optimizer.average = torch.optim.swa_utils.AveragedModel(model)
        return optimizer
"""
    )
    detail = ask(copied, memory_limit=200 << 20)["details"][0]
    assert detail["parameters_bytes"] - 2 * WEIGHTS < 4096


def test_a_model_of_four_gigabytes_is_traced_in_a_fraction_of_one(ask):
    lines = []
    source = """
    def build_model():
        return nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(16)])

    def make_batch(size):
        return torch.randn(size, 8192)

    def compute_loss(model, batch):
        print("resident", *(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
        return model(batch).square().mean()
"""
    with Worker(None, LocalLauncher(lines.append, program=PROGRAM)) as worker:
        answer = ask(source, worker=worker)
        wait_until(lambda: lines)  # what it printed comes on a line of its own
    assert answer["gpus"][0]["max_batch_size"] > 1
    resident_kib = [int(line.split()[1]) for line in lines if line.startswith("resident")]
    assert max(resident_kib) < 1 << 20


def test_a_peak_in_the_optimizer_that_fits_with_its_band_is_safe_at_any_batch_below(ask):
    needed = ask(MLP, memory_limit=1 << 20)["gpus"][0]["needed_bytes"]
    row = ask(MLP, memory_limit=int(needed * 1.04) + (60 << 20))["gpus"][0]
    assert row["safe_max_batch_size"] > 0


def test_an_incomplete_task_is_the_users_error(ask):
    with pytest.raises(BatchtuneError, match="make_batch"):
        ask("""
    def build_model():
        return nn.Linear(1, 1)
""")
