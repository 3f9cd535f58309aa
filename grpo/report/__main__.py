"""Make a page of a run's curves and completions: one HTML file, and with --png the curves as pictures beside it.

    grpo report runs/DATE-TIME
    grpo report runs/ONE runs/OTHER --output comparison
    grpo report runs/DATE-TIME --serve

Several runs share each chart. A run may still be running, or have been killed: the report leaves damaged lines out,
and says so. The page needs no network and no server: open report.html from the disk.
"""

import sys

from grpo.config.command_line import parse_arguments
from grpo.config.programs import ReportConfig
from grpo.report.page import report, serve
from grpo.run.exit import exit_code


def main() -> int:
    config = parse_arguments(ReportConfig, __doc__)

    def run() -> None:
        if config.serve:
            return serve(config)
        for path in report(config):
            print(path, flush=True)

    return exit_code(run, (OSError,), "interrupted")


if __name__ == "__main__":
    sys.exit(main())
