"""Read MindCluster's data on a job's hosts and ranks, and send it requests.

MindCluster's parts write ConfigMaps. The device plugin writes about chips and bus switches, NodeD
about boards, ClusterD about the complete cluster and its own recovery of a job. This package reads
them, and does not use damaged data. Source: github.com/Ascend/mind-cluster, the guides of 7.0 to
26.1.
"""
