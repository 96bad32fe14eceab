"""Defects that the changelog names, each as the least change of the package that brings it back."""

from dataclasses import dataclass

STUDY = "tests/unit/tune/test_study.py"
VERDICT = "tests/unit/tune/test_recommend.py"
SAMPLER = "tests/unit/tune/test_surface_and_sampler.py"
CONFIG = "tests/unit/test_config.py tests/unit/test_config_file.py"
FOLDER = "tests/unit/test_run_folder.py"


@dataclass(frozen=True)
class Defect:
    """One defect.

    Attributes:
        name: what a user saw.
        file: of the package.
        sound: the code as it is, once in the file.
        broken: what stands in its place where the defect is back.
        tests: files or tests of theirs, with spaces between them, of which one is to fail.
    """

    name: str
    file: str
    sound: str
    broken: str
    tests: str


DEFECTS = [
    Defect(
        "the user's bounds on the learning rate are widened to hold the baseline",
        "tune/plan/space.py",
        'lowest = rates.min if "min" in rates.model_fields_set else min(rates.min, baseline)',
        "lowest = min(rates.min, baseline)",
        "tests/unit/tune/test_space.py",
    ),
    Defect(
        "an argument under space: is searched beyond its bounds to hold today's value",
        "tune/plan/space.py",
        "self.searched[name] = FloatDistribution(each.min, each.max, log=each.log)",
        "self.searched[name] = self.distributions[name]",
        f"{STUDY}::test_an_argument_is_not_searched_beyond_the_users_bounds",
    ),
    Defect(
        "an optimizer argument whose default is infinite ends as a bug",
        "tune/plan/space.py",
        "if isinstance(baseline, float) and not math.isfinite(baseline):",
        "if False:",
        "tests/unit/tune/test_space.py",
    ),
    Defect(
        "after a run out of memory in one precision the next ones of its size are as large",
        "tune/study/limits.py",
        "most = max_micro if too_large is None else max(1, min(max_micro, too_large // 2))",
        "most = max_micro",
        f"{STUDY}::test_a_precision_that_takes_more_memory_goes_on_in_smaller_micro_batches",
    ),
    Defect(
        "a contender on a fresh seed is not given the time that the baseline took",
        "tune/study/limits.py",
        'return max([LOST_FACTOR * min(own), *self._taken("baseline")]) if own else None',
        "return LOST_FACTOR * min(own) if own else None",
        f"{STUDY}::test_it_has_as_much_where_the_baseline_did_not_get_there",
    ),
    Defect(
        "the baseline is not cut off on fresh seeds once it has lost",
        "tune/study/limits.py",
        "return LOST_FACTOR * best if best is not None else None",
        "return None",
        f"{STUDY}::test_the_baseline_is_confirmed_no_longer_than_is_needed_to_see_that_it_lost",
    ),
    Defect(
        "a target set by a baseline that then diverged is not said to be one",
        "tune/study/targets.py",
        "seconds) if diverged else found",
        "seconds) if False else found",
        f"{STUDY}::test_a_baseline_that_breaks_sets_a_target_of_which_that_is_said",
    ),
    Defect(
        "a target that another seed meets before training is not noticed",
        "tune/study/targets.py",
        "starts = [trial.curve[0].value for trial in self._history.records() if trial.curve]",
        "starts = [trial.curve[0].value for trial in self._history.records() if trial.curve][:1]",
        f"{STUDY}::test_a_target_that_another_seed_meets_before_training_is_refused",
    ),
    Defect(
        "something is recommended though the target is met before training",
        "tune/study/phases.py",
        "if self.parts.targets.met_at_start():",
        "if False:",
        f"{STUDY}::test_where_a_target_is_met_before_training_nothing_is_recommended",
    ),
    Defect(
        "that every run diverged is not said to be why nothing is recommended",
        "tune/study/targets.py",
        'if ended and all(trial.outcome == "diverged" for trial in ended):',
        "if False:",
        f"{STUDY}::test_a_study_in_which_every_run_diverges_says_so",
    ),
    Defect(
        "that the time went before anything was searched is not said",
        "tune/study/targets.py",
        'if not any(trial.role == "search" for trial in ended):',
        "if False:",
        f"{STUDY}::test_a_study_whose_time_went_before_its_search_says_so",
    ),
    Defect(
        "a baseline that died, or was cut off by budget.total, sets the target",
        "tune/study/trials.py",
        'if role == "baseline" and outcome not in FAILED and not no_time_left:',
        'if role == "baseline":',
        f"{STUDY}::test_a_baseline_that_dies_sets_no_target",
    ),
    Defect(
        "a study ends where the task raised in three runs of the search, and confirms nothing",
        "tune/study/search.py",
        'if not parts.history.finished("search") and not others:',
        "if not others:",
        f"{STUDY}::test_a_task_that_raises_again_and_again_ends_the_search_and_what_got_there_is_confirmed",
    ),
    Defect(
        "the search ends by what batch size and learning rate alone promise, whatever else is searched",
        "tune/study/search.py",
        "self._judge = None if parts.space.has_other_parameters else self._sampler",
        "self._judge = self._sampler",
        f"{STUDY}::test_arguments_of_the_optimizer_are_searched_recorded_and_confirmed",
    ),
    Defect(
        "a baseline that takes all of budget.run leaves no time to search",
        "tune/study/budget.py",
        "return min(self._needed(self._config.confirm.seeds), MOST_RESERVED * max(0.0, left))",
        "return self._needed(self._config.confirm.seeds)",
        f"{STUDY}::test_a_baseline_that_takes_all_of_the_longest_run_leaves_time_to_search",
    ),
    Defect(
        "slow evaluation leaves no time for the confirmation",
        "tune/study/budget.py",
        "needed += math.ceil(runs / self._at_once) * beside + math.ceil(seeds / self._at_once) * more",
        "pass",
        f"{STUDY}::test_slow_evaluation_is_counted_in_what_confirmation_needs",
    ),
    Defect(
        "two contenders for the best metric where budget.total has room for one on all seeds",
        "tune/study/budget.py",
        "return next((each for each in range(most, 1, -1) if math.ceil((each + 1) / self._at_once) <= rounds), 1)",
        "return most",
        f"{STUDY}::test_fewer_contenders_for_the_best_metric_are_confirmed_on_all_seeds",
    ),
    Defect(
        "a configuration at which the task crashed is proposed again and again",
        "tune/optuna_parts/sampler.py",
        'again = [trial for trial in failed if trial.user_attrs.get("outcome") in FAILED_FOR_GOOD]',
        "again = []",
        f"{SAMPLER}::test_a_place_where_a_run_crashed_is_not_tried_again",
    ),
    Defect(
        "the sampler proposes one and the same corner where nothing promises more",
        "tune/optuna_parts/sampler.py",
        "if not gain[chosen]:",
        "if False:",
        f"{SAMPLER}::test_where_nothing_promises_more_the_best_of_what_was_not_tried_is_next",
    ),
    Defect(
        "an objective of infinity is no run that came apart",
        "tune/optuna_parts/sampler.py",
        "or trial.state is TrialState.COMPLETE  # at infinity",
        "",
        f"{SAMPLER}::test_an_objective_may_say_infinity_where_training_came_apart",
    ),
    Defect(
        "sampler and pruner take a study that does not minimise one value",
        "tune/optuna_parts/sampler.py",
        "if study.directions != [StudyDirection.MINIMIZE]:",
        "if False:",
        f"{SAMPLER}::test_a_study_that_does_not_minimise_one_time_is_refused",
    ),
    Defect(
        "numbers under space: have sixteen digits",
        "tune/optuna_parts/sampler.py",
        "found = _rounded(value)",
        "found = value",
        f"{SAMPLER}::test_numbers_that_are_written_into_configurations_are_short_and_stay_in_their_range",
    ),
    Defect(
        "a first run that has levelled off right above its target is stopped",
        "tune/optuna_parts/pruner.py",
        "if self._target is None or self._longest is None:",
        "if True:",
        "tests/unit/tune/test_pruner.py",
    ),
    Defect(
        "the smaller batch is taken though it is much slower",
        "tune/verdict/recommend.py",
        "return ratio.median < LEVEL or (ratio.median <= TIED and ratio.low <= 1.0)",
        "return ratio.median < LEVEL or ratio.low <= 1.0",
        VERDICT,
    ),
    Defect(
        "a metric to maximize goes to the smaller batch however much worse it is",
        "tune/verdict/recommend.py",
        "return statistics.median(left) <= max(right) and apart <= (TIED - 1) * abs(statistics.median(right))",
        "return statistics.median(left) <= max(right)",
        VERDICT,
    ),
    Defect(
        "of two single runs whichever was better by chance is recommended",
        "tune/verdict/recommend.py",
        "single = min(len(contender), len(baseline)) == 1",
        "single = False",
        VERDICT,
    ),
    Defect(
        "a contender that came to nothing on half of its seeds counts as if it had been fast",
        "tune/verdict/recommend.py",
        "if scoring.refused(group):",
        "if False:",
        VERDICT,
    ),
    Defect(
        "a baseline that diverges on fresh seeds counts as fast as it came apart",
        "tune/verdict/recommend.py",
        "ran = [cost.spent(trial) if trial.outcome not in WORTHLESS else None for trial in group]",
        "ran = [cost.spent(trial) for trial in group]",
        VERDICT,
    ),
    Defect(
        "what is confirmed does not differ in batch size",
        "tune/verdict/scores.py",
        "key=lambda trial: (trial.number not in leaders, scoring.worth(trial))",
        "key=scoring.worth",
        VERDICT,
    ),
    Defect(
        "half a line of attempts.jsonl stays, and the next attempt is added to it",
        "run_folder.py",
        'cut_to_whole_lines(self.path / "attempts.jsonl")',
        "pass",
        FOLDER,
    ),
    Defect(
        "temporary files of a killed run stay",
        "run_folder.py",
        "half.unlink(missing_ok=True)",
        "pass",
        FOLDER,
    ),
    Defect(
        "a study that was killed does not say that its journal has more than its result",
        "result.py",
        "return len(written) == 2 and written[1] > written[0] + _AT_ONCE_SECONDS",
        "return False",
        FOLDER,
    ),
    Defect(
        "run names that are devices on Windows are taken",
        "config/fields.py",
        r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)(?:\.|$))",
        "",
        CONFIG,
    ),
    Defect(
        "workers: true is taken for one worker",
        "config/fields.py",
        "if isinstance(value, bool):",
        "if False:",
        CONFIG,
    ),
    Defect(
        "best_metric takes a target",
        "config/objective.py",
        'if self.kind == "best_metric" and self.target != "auto":',
        "if False:",
        CONFIG,
    ),
    Defect(
        "SQLite is taken as the storage of several workers",
        "config/schema.py",
        'if storage is not None and storage.startswith("sqlite") and known.data.get("workers", 1) != 1:',
        "if False:",
        CONFIG,
    ),
    Defect(
        "the password in a storage URL is written into the run folder",
        "config/schema.py",
        'document["storage"] = without_passwords(self.storage)',
        "pass",
        CONFIG,
    ),
    Defect(
        "a misspelled space.learning_rte is searched as an argument of the optimizer",
        "config/space.py",
        "_MISSPELLED = 0.9",
        "_MISSPELLED = 1.0",
        CONFIG,
    ),
    Defect(
        "passwords stand in messages",
        "errors.py",
        'super().__init__(without_passwords(f"{_FLAGS[setting]} {detail}" if setting else detail))',
        "super().__init__(detail)",
        "tests/unit/test_errors.py",
    ),
    Defect(
        "the result of a long study is too large to be read back",
        "result.py",
        "MAX_BYTES = 128 << 20",
        "MAX_BYTES = 64 << 20",
        "tests/unit/test_results.py::test_the_result_of_a_long_study_reads_back",
    ),
    Defect(
        "evaluation that needs more than training is found by ever smaller steps",
        "probe/final_check.py",
        'if failed.outcome == "timeout" or len(evaluated) == 2:',
        'if failed.outcome == "timeout":',
        "tests/unit/probe/test_final_check.py tests/unit/probe/test_runner.py",
    ),
    Defect(
        "a final check whose evaluate() takes too long is tried at ever smaller batches",
        "probe/final_check.py",
        "if len(last) < _MOST_SILENCES or",
        "if True or",
        "tests/unit/probe/test_final_check.py tests/unit/probe/test_runner.py",
    ),
    Defect(
        "an estimate that an out-of-memory error refutes is kept",
        "probe/search.py",
        "prior = None if limit is None or _is_refuted(prior, attempts) else prior",
        "prior = None if limit is None else prior",
        "tests/unit/probe/test_search.py::test_a_prior_that_an_out_of_memory_error_refutes_is_dropped",
    ),
    Defect(
        "text of a user's becomes a part of the page",
        "report/formats.py",
        "autoescape=True",
        "autoescape=False",
        "tests/unit/report/test_html.py::test_no_text_in_any_field_of_a_result_can_become_a_part_of_the_page",
    ),
    Defect(
        "--format deepspeed|hf name today's optimizer, not the one that was chosen",
        "report/view/settings.py",
        "return self.found.optimizer or self.result.task.optimizer",
        "return self.result.task.optimizer",
        "tests/unit/report/test_trainers.py",
    ),
    Defect(
        "a study without a recommendation exports the size of its probe",
        "report/view/settings.py",
        'if result.kind == "tune":',
        "if False:",
        "tests/unit/report/test_trainers.py",
    ),
    Defect(
        "batch_size: {min: 40, max: 60} is not tried at its ends",
        "tune/plan/prior.py",
        "regular |= {end for end in ends if all(max(end, size) >= _NEAR * min(end, size) for size in regular)}",
        "pass",
        "tests/unit/tune/test_prior.py",
    ),
]
