"""The clusters that a user chooses from: each lends machines to a training by starting one node agent per machine."""
