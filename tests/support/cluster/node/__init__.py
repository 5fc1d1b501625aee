"""The parts of the kubelet that runs pods as processes of this machine."""
