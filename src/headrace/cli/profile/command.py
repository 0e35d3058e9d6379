"""The command's work: checks first, then the run, then what is shown and written."""

import json
import sys
from dataclasses import asdict

from headrace.cli.fetching import fetch_model
from headrace.cli.network import require_free_port
from headrace.cli.profile.plan import HOST, ProfileOptions, plan_profile
from headrace.cli.profile.report import rendered
from headrace.cli.run_directory import private_directory

INTERRUPTED = 130


def profile_step(options: ProfileOptions) -> int:
    """-> the exit status. Raises InputError, ChildEnded, StreamsFailed."""
    port = require_free_port(HOST, 0)
    model_dir = fetch_model(options.model)
    with private_directory() as directory:
        plan = plan_profile(options, model_dir=model_dir, directory=directory, port=port)
        # Function-local: it loads torch, once all is right.
        from headrace.cli.profile.run import run_profile

        profile = run_profile(plan)
    if profile is None:
        return INTERRUPTED
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(asdict(profile), indent=1) + "\n")
    sys.stdout.write(rendered(profile))
    return 0
