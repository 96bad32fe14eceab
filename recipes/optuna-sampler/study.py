"""batchtune's sampler and pruner in an Optuna study of one's own: a training loop, no task file, no run folder.

python recipes/optuna-sampler/study.py --trials 12
"""

import argparse
import math
import time

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn

from batchtune.tune.optuna_parts.pruner import TimeToValuePruner
from batchtune.tune.optuna_parts.sampler import LOWER_BOUND, TimeToTargetSampler

TARGET = 0.15  # validation loss that counts as solved
LONGEST_SECONDS = 5.0  # of one run
CAP = 1.2  # times the best so far: nothing that takes longer is the answer
STEPS = 10  # between two looks at the validation loss


def data():
    """Images and labels of scikit-learn's digits: 1,437 to train on, 360 to validate."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return [(images[part], labels[part]) for part in (order[360:], order[:360])]


def seconds_to_target(trial):
    """Trains until the target; the value is the training time that took, validation excluded."""
    batch_size = trial.suggest_int("batch_size", 8, 512, log=True)
    learning_rate = trial.suggest_float("learning_rate", 1e-3, 3.0, log=True)
    momentum = trial.suggest_categorical("momentum", [0.0, 0.9])  # one of your own: left to another sampler
    torch.manual_seed(trial.number)
    (images, labels), (held_out, answers) = data()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    seconds, limit = 0.0, min(LONGEST_SECONDS, CAP * best_value(trial.study))
    while seconds < limit:
        started = time.perf_counter()
        for _ in range(STEPS):
            chosen = torch.randint(len(images), (batch_size,))
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds += time.perf_counter() - started
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(held_out), answers))
        if not math.isfinite(loss):
            trial.set_user_attr("outcome", "diverged")  # the sampler stays away from there
            raise optuna.TrialPruned
        trial.report(loss, round(1000 * seconds))  # in milliseconds of training, so that batch sizes compare
        if loss <= TARGET:
            return seconds
        if trial.should_prune():
            limit = seconds
    trial.set_user_attr(LOWER_BOUND, seconds)  # not a failure: it takes longer than this
    raise optuna.TrialPruned


def best_value(study):
    """The best value so far; infinite before the first."""
    done = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    return min((trial.value for trial in done), default=math.inf)


def main():
    """Runs the study and prints its best trial."""
    parser = argparse.ArgumentParser(description="batchtune's Optuna parts on an objective of one's own")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage", help="an Optuna storage URL, for example sqlite:///study.db")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a net this small gains nothing from more
    study = optuna.create_study(
        study_name="optuna-sampler",
        storage=arguments.storage,
        load_if_exists=True,
        sampler=TimeToTargetSampler(seed=arguments.seed, independent=optuna.samplers.TPESampler(seed=arguments.seed)),
        pruner=TimeToValuePruner("minimize"),
    )
    study.enqueue_trial({"batch_size": 32, "learning_rate": 0.1, "momentum": 0.0})  # what you would run today
    study.optimize(seconds_to_target, n_trials=arguments.trials)
    first, best = study.trials[0], study.best_trial
    print(f"today: {first.value:.3f} s" if first.value else f"today: not within {LONGEST_SECONDS:g} s")
    print(f"best of {len(study.trials)}: {best.value:.3f} s with {best.params}")


if __name__ == "__main__":
    main()
