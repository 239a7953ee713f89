"""What the system knows of a peer's user: names, groups, and who is an administrator."""

from __future__ import annotations

import grp
import os
import pwd
from functools import lru_cache

from .sessions import Peer


def is_member(peer: Peer, gid: int) -> bool:
    """By the group of its process, as the kernel says, or by the groups of its user, as the system lists them."""
    if gid == peer.gid:
        return True
    try:
        user = pwd.getpwuid(peer.uid)
    except KeyError:
        return False
    return gid in os.getgrouplist(user.pw_name, user.pw_gid)


def is_admin(peer: Peer, admin_group: str) -> bool:
    """Root, the daemon's own user, and the members of `admin_group`; from other machines, keys that say so."""
    if peer.remote is not None:
        return peer.remote.admin
    if peer.uid in (0, os.geteuid()):
        return True
    if not admin_group:
        return False
    try:
        gid = int(admin_group) if admin_group.isdecimal() else grp.getgrnam(admin_group).gr_gid
    except KeyError:
        return False
    return is_member(peer, gid)


@lru_cache(maxsize=256)
def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
