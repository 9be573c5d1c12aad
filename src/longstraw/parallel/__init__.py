"""Several processes: who holds what of a prompt, what they tell each other, gradients summed over a DeviceMesh."""
