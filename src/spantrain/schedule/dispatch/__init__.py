"""What a replica does next: pure decision machines that simulator and runtime drive alike.

Not here: clocks and messages.
To add a policy: a subclass of `DispatchMachine`, and the schedule that it runs in `policies.RUN_TIME_SCHEDULES`.
"""
