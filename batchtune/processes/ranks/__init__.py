"""Several processes that train one model: who starts them, who speaks for them, what their answers come to."""
