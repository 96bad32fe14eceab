"""The batch size and learning rate that solve the task soonest: an Optuna study over real training runs."""
