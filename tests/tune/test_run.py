"""A whole run of `tune`: what its document holds once all is done."""


def test_a_finished_study_carries_what_its_surface_predicts(tuned):
    document = tuned.document
    ended = [trial for trial in document["trials"] if trial["state"] in {"complete", "pruned"}]
    predicted = document["landscape"]
    assert predicted["runs"] == len(ended)
    assert set(predicted["batch_sizes"]) >= {trial["batch_size"] for trial in ended}
    assert predicted["learning_rates"][0] <= min(trial["learning_rate"] for trial in ended)
