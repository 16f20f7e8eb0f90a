"""Job and sweep files, checked and resolved; for launch, run_folder, report, app, cli, xrunner."""
