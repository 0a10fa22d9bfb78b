"""Checkpoints that outlive the plan: safetensors files keyed by the unsplit model's names, and a manifest.

Layout under a run's folder:

    checkpoint/step-30/DEVICE-SHA.safetensors   what a device holds: whole tensors or parts of them
    checkpoint/step-30/manifest.json            the run so far, and for every file what is in it and its SHA-256
    checkpoint/latest                           the name of the newest complete one

The device's side

device          one device's checkpoints during a run: begin with one, save, end
holding         what a device holds, by the names of the unsplit model; what of it is saved and needed
snapshot        a copy in host memory, so that training goes on
saver           the thread that writes
restore         what a device needs, from its own disk and from the others

The coordinator's side

manifest        what makes a checkpoint complete, and the marker that names the newest
complete        complete when all devices have written; then old ones go

Both

tensor_file     safetensors, written piece by piece, read block by block
storage         the file operations, each one a call
"""
