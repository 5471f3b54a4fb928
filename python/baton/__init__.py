"""Baton: memory moved between processes and machines. See baton.agent and baton.communicator; baton.nixl is a drop-in for NIXL."""
from ._library import lib as _lib
from .agent import READ, WRITE, Agent, DescriptorList, Telemetry, Transfer, memory_supported
from .buffers import BLOCK, DRAM, FILE, OBJECT, VRAM, Memory, memory_of
from .communicator import ANY_RANK, Communicator
from .connector import KvConnector, KvJob, KvLoad
from .endpoint import Endpoint, Place, Rendezvous, place_from_environment
from .errors import (BackendError, BatonError, BatonTimeoutError, CancelledError, InvalidParamError, MismatchError,
                     NotAllowedError, NotFoundError, NotPostedError, NotSupportedError, RemoteDisconnectError,
                     RepostActiveError, UnknownError)
from .experts import Experts, ExpertGroup, ExpertsWork, Received
from .kv import KvGroup, KvLayout, KvModel, KvPlan, KvShare
from .window import Window
from .work import Work

__version__ = _lib.version().decode()
__all__ = ["Agent", "ANY_RANK", "Communicator", "Endpoint", "Place", "Experts", "ExpertGroup", "ExpertsWork", "Received", "Rendezvous", "Window", "Work", "place_from_environment", "DescriptorList", "Transfer", "Telemetry", "Memory", "memory_of", "memory_supported", "WRITE", "READ",
           "KvConnector", "KvGroup", "KvJob", "KvLayout", "KvLoad", "KvModel", "KvPlan", "KvShare", "DRAM", "VRAM", "BLOCK", "OBJECT", "FILE",
           "BatonError", "BackendError", "BatonTimeoutError", "CancelledError", "InvalidParamError", "MismatchError",
           "NotAllowedError", "NotFoundError", "NotPostedError", "NotSupportedError", "RemoteDisconnectError",
           "RepostActiveError", "UnknownError"]
