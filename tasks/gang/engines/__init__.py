"""The clusters of a user's choice: each lends machines to a training, by starting one node agent on each."""
