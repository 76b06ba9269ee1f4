"""Training under any admitted plan, on torch alone: no process, no socket, no scheduler."""
