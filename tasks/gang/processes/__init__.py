"""Ranks as processes of this machine: started, forked, watched for output, and what each left when it exited."""
