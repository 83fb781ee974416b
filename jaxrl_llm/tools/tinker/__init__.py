"""A server for clients of Tinker: training runs that clients compose of four calls, beside `serve`.

`service.py` has the runs and their endpoints, `samplers.py` those of samples, `rest.py` those of what is saved,
`sessions.py` who asks and `results.py` what clients fetch; `training_run.py` a run itself: gradients that add up, and
the optimizer's steps; `losses.py` the losses that clients name; `checkpoints.py` the folder that runs are saved in;
`messages.py` what goes over the wire.
"""
