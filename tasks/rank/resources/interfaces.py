"""The variables by which collectives use one network interface."""


def interface_variables(interface: str) -> dict[str, str]:
    """Return the variables with which gloo and NCCL use `interface`, and no other one.

    NCCL takes a bare name for the beginning of names: "eth1" would select eth10, and "bond0" its VLANs, such as bond0.100
    (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname).
    """
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
