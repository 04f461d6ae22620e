"""Former names of modules in `rlctl.jobs`."""
