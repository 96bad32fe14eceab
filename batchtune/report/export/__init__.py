"""A result in other programs: trainers' settings, experiment trackers."""
