"""Types that the client takes and returns: plain frozen data, without transport.

Sizes are bytes, durations seconds, times are aware UTC datetimes.

generation  requests to generate, and their answers
embedding   vectors and labels of inputs, scores of documents
replicas    the inference service's replicas: resident adapters, debug bundles, traces
store       adapters and their versions, layouts, events, tiers
"""

from __future__ import annotations

from contract.images.segment_kinds import SegmentKind as SegmentKind
from contract.images.targets import TargetKind as TargetKind
from loadout._rpc.arrays import PackedLogprobs as PackedLogprobs
from loadout._rpc.arrays import RoutedExperts as RoutedExperts
from loadout._rpc.server_info import ClassifierInfo as ClassifierInfo
from loadout._rpc.server_info import EmbeddingInfo as EmbeddingInfo
from loadout._rpc.server_info import ExpertLayers as ExpertLayers
from loadout._rpc.server_info import GenerationState as GenerationState
from loadout._rpc.server_info import MemoryUse as MemoryUse
from loadout._rpc.server_info import Processor as Processor
from loadout._rpc.server_info import RankStatus as RankStatus
from loadout._rpc.server_info import RecurrentStates as RecurrentStates
from loadout._rpc.server_info import SamplingDefaults as SamplingDefaults
from loadout._rpc.server_info import ServerInfo as ServerInfo
from loadout._rpc.server_info import ServerLimits as ServerLimits
from loadout._rpc.server_info import WeightFormat as WeightFormat
from loadout.types.embedding import Classification as Classification
from loadout.types.embedding import Embedding as Embedding
from loadout.types.embedding import Pooling as Pooling
from loadout.types.embedding import Score as Score
from loadout.types.embedding import TokenClassification as TokenClassification
from loadout.types.embedding import Truncation as Truncation
from loadout.types.generation import AdapterIdentity as AdapterIdentity
from loadout.types.generation import AnsweredCall as AnsweredCall
from loadout.types.generation import ChatImage as ChatImage
from loadout.types.generation import ChatMessage as ChatMessage
from loadout.types.generation import ChatOptions as ChatOptions
from loadout.types.generation import Chunk as Chunk
from loadout.types.generation import Completion as Completion
from loadout.types.generation import FinishReason as FinishReason
from loadout.types.generation import GenerationOptions as GenerationOptions
from loadout.types.generation import Logprob as Logprob
from loadout.types.generation import SamplingParams as SamplingParams
from loadout.types.generation import Structure as Structure
from loadout.types.generation import Timings as Timings
from loadout.types.generation import TokenLogprobs as TokenLogprobs
from loadout.types.generation import Tool as Tool
from loadout.types.generation import ToolCall as ToolCall
from loadout.types.generation import ToolCallPiece as ToolCallPiece
from loadout.types.generation import ToolChoice as ToolChoice
from loadout.types.generation import Usage as Usage
from loadout.types.generation import VersionPolicy as VersionPolicy
from loadout.types.replicas import AdapterTier as AdapterTier
from loadout.types.replicas import DebugPart as DebugPart
from loadout.types.replicas import InspectedAdapter as InspectedAdapter
from loadout.types.replicas import OperationGroup as OperationGroup
from loadout.types.replicas import Replica as Replica
from loadout.types.replicas import ResidentAdapter as ResidentAdapter
from loadout.types.replicas import ResidentExtent as ResidentExtent
from loadout.types.replicas import ResidentSegment as ResidentSegment
from loadout.types.replicas import ResidentTarget as ResidentTarget
from loadout.types.replicas import TracePiece as TracePiece
from loadout.types.store import Adapter as Adapter
from loadout.types.store import AdapterEvent as AdapterEvent
from loadout.types.store import AdapterPage as AdapterPage
from loadout.types.store import BaseModelSource as BaseModelSource
from loadout.types.store import EventKind as EventKind
from loadout.types.store import ImageState as ImageState
from loadout.types.store import Layout as Layout
from loadout.types.store import LayoutPage as LayoutPage
from loadout.types.store import LayoutState as LayoutState
from loadout.types.store import PrunedPage as PrunedPage
from loadout.types.store import Registration as Registration
from loadout.types.store import ServerVerdict as ServerVerdict
from loadout.types.store import Signature as Signature
from loadout.types.store import SourceFile as SourceFile
from loadout.types.store import StoreStatus as StoreStatus
from loadout.types.store import TierStatus as TierStatus
from loadout.types.store import VersionPage as VersionPage
