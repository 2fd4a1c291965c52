"""Which strings may be keys: what is read from a storage decides where files are written, so it is checked first."""


def check_key(key: str) -> str:
    """Return `key`, one or more names joined with "/" that stay below wherever they are joined to.

    Raises:
        ValueError: If it is empty or absolute, or holds "..", ".", an empty name, a backslash or a control character.

    """
    names = key.split("/")
    if any(name in ("", ".", "..") for name in names) or "\\" in key or any(character < " " for character in key):
        raise ValueError(f"{key!r} cannot be a storage key: use plain names joined with '/'")
    return key
