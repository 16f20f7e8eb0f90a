"""Re-planning while a job runs: evidence on lengths and step times, and changes of the schedule.
The application imports it."""
