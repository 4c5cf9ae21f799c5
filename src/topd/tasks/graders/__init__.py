"""One module per grader; `task.grader = "exact"` selects the module `topd.tasks.graders.exact`."""
