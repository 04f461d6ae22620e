"""Former name of `rlctl.jobs.laptop_model`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("rlctl.jobs.laptop_model", run_name="__main__", alter_sys=True)
