"""Where a study is kept, and how several machines share one."""
