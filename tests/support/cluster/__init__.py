"""A small Kubernetes for tests: an API server with controllers, and a kubelet of processes.

It imports nothing of Rekindle. What it does is what a real server was measured to do; the tests in
`tests/contract/kubernetes` hold it to that, and run against a real cluster as well.
"""
