"""Parameter servers: ranks that hold masters and states, and serve the ranks that train.

server.py       the loop of a server: add up what workers push, update, send new parameters
calls.py        what a worker asks of the servers: a step, a checkpoint, the whole model
"""
