"""Workers as processes of this machine: started, watched, ended.

Not here: what they do (`runtime.worker`); other machines are started by what people have.
Environment variables are read here only.
"""
