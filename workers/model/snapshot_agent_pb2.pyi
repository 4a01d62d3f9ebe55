from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Processes(_message.Message):
    __slots__ = ("pids",)
    PIDS_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pids: _Optional[_Iterable[int]] = ...) -> None: ...

class Cuda(_message.Message):
    __slots__ = ("explicit_target",)
    EXPLICIT_TARGET_FIELD_NUMBER: _ClassVar[int]
    explicit_target: Processes
    def __init__(self, explicit_target: _Optional[_Union[Processes, _Mapping]] = ...) -> None: ...

class BackendConfig(_message.Message):
    __slots__ = ("cuda",)
    CUDA_FIELD_NUMBER: _ClassVar[int]
    cuda: Cuda
    def __init__(self, cuda: _Optional[_Union[Cuda, _Mapping]] = ...) -> None: ...

class JobRequest(_message.Message):
    __slots__ = ("job_id", "backend_config")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    BACKEND_CONFIG_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    backend_config: BackendConfig
    def __init__(self, job_id: _Optional[str] = ..., backend_config: _Optional[_Union[BackendConfig, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("operation_id",)
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    def __init__(self, operation_id: _Optional[str] = ...) -> None: ...

class OperationRequest(_message.Message):
    __slots__ = ("operation_id",)
    OPERATION_ID_FIELD_NUMBER: _ClassVar[int]
    operation_id: str
    def __init__(self, operation_id: _Optional[str] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("status", "error")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Operation.Status]
        PENDING: _ClassVar[Operation.Status]
        COMPLETE: _ClassVar[Operation.Status]
        FAILED: _ClassVar[Operation.Status]
    UNSPECIFIED: Operation.Status
    PENDING: Operation.Status
    COMPLETE: Operation.Status
    FAILED: Operation.Status
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    status: Operation.Status
    error: str
    def __init__(self, status: _Optional[_Union[Operation.Status, str]] = ..., error: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Job(_message.Message):
    __slots__ = ("job_id", "state")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Job.State]
        IDLE: _ClassVar[Job.State]
        RUNNING: _ClassVar[Job.State]
        TRANSITIONING: _ClassVar[Job.State]
        SAVED: _ClassVar[Job.State]
        FAULTED: _ClassVar[Job.State]
    UNSPECIFIED: Job.State
    IDLE: Job.State
    RUNNING: Job.State
    TRANSITIONING: Job.State
    SAVED: Job.State
    FAULTED: Job.State
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    state: Job.State
    def __init__(self, job_id: _Optional[str] = ..., state: _Optional[_Union[Job.State, str]] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("job_statuses",)
    JOB_STATUSES_FIELD_NUMBER: _ClassVar[int]
    job_statuses: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, job_statuses: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...
