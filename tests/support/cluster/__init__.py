"""A small Kubernetes for tests: an API server with controllers, and a kubelet that runs processes.

It imports nothing of Rekindle. It behaves as measured on a real server. The tests in
`tests/contract/kubernetes` verify this, and also run against a real cluster.
"""
