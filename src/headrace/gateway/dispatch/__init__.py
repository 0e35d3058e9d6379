"""Requests, as token ids, at instances. Knows neither HTTP nor text.

its loop    dispatcher, over the control socket; exchange: instances, the line of who waits, attempts under way
operators   operator_desk: how the deployment stands, what is to change in it
observed    what instances were seen to do: affinity (who has which prefix), streams (who is at which decoder)
a request   life: door, placing (patience), attempt after attempt (each an errand); figures, metrics
"""
