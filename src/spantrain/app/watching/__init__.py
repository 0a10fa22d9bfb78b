"""What people look at while a run trains: the view of a run, why its steps took so long, the page, metrics.

`view` says what there is to see and `run_watch` keeps it up to date in the run's folder; `chain` finds who waited for
whom. `server` shows a folder's view to browsers and Prometheus, by `page.html` and `metrics_text`; it knows nothing of
runs. Not here: what the terminal shows (`cli.render`), scalars for trackers (`app.training.trackers`).
To add something to see: a field in `view`, filled in `run_watch`, drawn in `page.html`.
"""
