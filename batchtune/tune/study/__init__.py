"""The study: its phases, what each run trains, its budget, its history and where they are kept."""
