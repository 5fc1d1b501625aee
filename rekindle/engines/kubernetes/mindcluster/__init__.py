"""What MindCluster says of a job's hosts and ranks, and what it is told.

Its parts write ConfigMaps: the device plugin about chips and bus switches, NodeD about boards,
ClusterD about the whole cluster and about its own recovery of a job. They are read here, and never
trusted where they are damaged. Facts: github.com/Ascend/mind-cluster, the guides of 7.0 to 26.1.
"""
