"""Predicting a deployment before it is there. Loads neither torch nor a native module.

scenario    what is simulated: instances, what their steps take, links, the gateway, failures
profile     what was measured of a machine, as a file, and the scenarios that follow from it
simulate    a run of it, request by request, in closed form from one change of a batch to the next; pure
"""
