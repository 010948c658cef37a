/* What the stand-in answers: a file mapped by the library and by the test (layout.py mirrors it).
 *
 * Change a field here and in layout.py together, and raise STATE_VERSION: nvmlInit compares magic,
 * version and size, and refuses a file of another layout.
 */
#include <stdint.h>

#define STATE_MAGIC 0x4152564d4c454447ULL
#define STATE_VERSION 5

#define MAX_DEVICES 16
#define MAX_INSTANCES 8
#define MAX_PROCESSES 512
#define MAX_EVENTS 64
#define MAX_LIMITS 8
#define MAX_GPM_METRICS 256
#define ANY_DEVICE MAX_DEVICES /* column of a control that holds for all devices and for none */

/* The used bytes of a unit are the sum of its processes and its unattributed bytes. */
#define DERIVED (UINT64_MAX - 1)

/* Every function that the library has, in the order of their numbers. */
#define FUNCTIONS(X)                          \
    X(nvmlInit)                               \
    X(nvmlInit_v2)                            \
    X(nvmlInitWithFlags)                      \
    X(nvmlShutdown)                           \
    X(nvmlErrorString)                        \
    X(nvmlSystemGetDriverVersion)             \
    X(nvmlSystemGetNVMLVersion)               \
    X(nvmlSystemGetCudaDriverVersion)         \
    X(nvmlSystemGetCudaDriverVersion_v2)      \
    X(nvmlSystemGetConfComputeState)          \
    X(nvmlDeviceGetCount_v2)                  \
    X(nvmlDeviceGetHandleByIndex_v2)          \
    X(nvmlDeviceGetHandleByUUID)              \
    X(nvmlDeviceGetHandleByPciBusId_v2)       \
    X(nvmlDeviceGetIndex)                     \
    X(nvmlDeviceGetName)                      \
    X(nvmlDeviceGetUUID)                      \
    X(nvmlDeviceGetSerial)                    \
    X(nvmlDeviceGetPciInfo_v3)                \
    X(nvmlDeviceGetMinorNumber)               \
    X(nvmlDeviceGetMemoryInfo)                \
    X(nvmlDeviceGetMemoryInfo_v2)             \
    X(nvmlDeviceGetBAR1MemoryInfo)            \
    X(nvmlDeviceGetConfComputeMemSizeInfo)    \
    X(nvmlDeviceGetComputeRunningProcesses)   \
    X(nvmlDeviceGetComputeRunningProcesses_v2) \
    X(nvmlDeviceGetComputeRunningProcesses_v3) \
    X(nvmlDeviceGetGraphicsRunningProcesses)  \
    X(nvmlDeviceGetGraphicsRunningProcesses_v2) \
    X(nvmlDeviceGetGraphicsRunningProcesses_v3) \
    X(nvmlDeviceGetMPSComputeRunningProcesses) \
    X(nvmlDeviceGetMPSComputeRunningProcesses_v2) \
    X(nvmlDeviceGetMPSComputeRunningProcesses_v3) \
    X(nvmlDeviceGetRunningProcessDetailList)  \
    X(nvmlDeviceGetProcessUtilization)        \
    X(nvmlDeviceGetUtilizationRates)          \
    X(nvmlDeviceGetSamples)                   \
    X(nvmlDeviceGetEncoderUtilization)        \
    X(nvmlDeviceGetDecoderUtilization)        \
    X(nvmlDeviceGetTemperature)               \
    X(nvmlDeviceGetTemperatureV)              \
    X(nvmlDeviceGetPowerUsage)                \
    X(nvmlDeviceGetPowerManagementLimit)      \
    X(nvmlDeviceGetEnforcedPowerLimit)        \
    X(nvmlDeviceGetTotalEnergyConsumption)    \
    X(nvmlDeviceGetClockInfo)                 \
    X(nvmlDeviceGetMaxClockInfo)              \
    X(nvmlDeviceGetCurrentClocksEventReasons) \
    X(nvmlDeviceGetCurrentClocksThrottleReasons) \
    X(nvmlDeviceGetPerformanceState)          \
    X(nvmlDeviceGetFanSpeed)                  \
    X(nvmlDeviceGetTotalEccErrors)            \
    X(nvmlDeviceGetRemappedRows)              \
    X(nvmlDeviceGetFieldValues)               \
    X(nvmlDeviceGetPcieThroughput)            \
    X(nvmlDeviceGetCurrPcieLinkGeneration)    \
    X(nvmlDeviceGetMaxPcieLinkGeneration)     \
    X(nvmlDeviceGetCurrPcieLinkWidth)         \
    X(nvmlDeviceGetMaxPcieLinkWidth)          \
    X(nvmlDeviceGetMigMode)                   \
    X(nvmlDeviceGetMaxMigDeviceCount)         \
    X(nvmlDeviceGetMigDeviceHandleByIndex)    \
    X(nvmlDeviceGetDeviceHandleFromMigDeviceHandle) \
    X(nvmlDeviceIsMigDeviceHandle)            \
    X(nvmlDeviceGetGpuInstanceId)             \
    X(nvmlDeviceGetComputeInstanceId)         \
    X(nvmlDeviceGetAttributes_v2)             \
    X(nvmlEventSetCreate)                     \
    X(nvmlEventSetFree)                       \
    X(nvmlEventSetWait_v2)                    \
    X(nvmlDeviceRegisterEvents)               \
    X(nvmlDeviceGetSupportedEventTypes)       \
    X(nvmlDeviceGetPersistenceMode)           \
    X(nvmlDeviceGetAccountingMode)            \
    X(nvmlDeviceGetDisplayMode)               \
    X(nvmlDeviceGetDisplayActive)             \
    X(nvmlDeviceGetDriverModel)               \
    X(nvmlDeviceGetDriverModel_v2)            \
    X(nvmlDeviceGetComputeMode)               \
    X(nvmlDeviceGetCudaComputeCapability)     \
    X(nvmlDeviceGetNumaNodeId)                \
    X(nvmlDeviceGetAddressingMode)            \
    X(nvmlDeviceGetVirtualizationMode)        \
    X(nvmlDeviceGetMemoryLimits_v1)           \
    X(nvmlDeviceGetGpuInstanceById)           \
    X(nvmlGpuInstanceGetInfo)                 \
    X(nvmlGpmQueryDeviceSupport)              \
    X(nvmlGpmSampleAlloc)                     \
    X(nvmlGpmSampleFree)                      \
    X(nvmlGpmSampleGet)                       \
    X(nvmlGpmMigSampleGet)                    \
    X(nvmlGpmMetricsGet)

#define NUMBER(name) number_##name,
enum function { FUNCTIONS(NUMBER) FUNCTION_COUNT };

struct process {
    uint64_t bytes; /* UINT64_MAX: not available */
    uint32_t pid;
    uint32_t unused;
};

struct process_list {
    uint32_t count;
    uint32_t count_after_size_question; /* 0, or what count becomes when a call found no room */
    struct process entries[MAX_PROCESSES];
};

enum list { COMPUTE, GRAPHICS, MPS, LIST_COUNT };

struct utilization_sample {
    uint64_t timestamp; /* 0: the moment of the call */
    uint32_t pid, sm, memory, encoder, decoder, unused;
};

/* What has memory and holders of its own: a GPU or a MIG instance. */
struct unit {
    char uuid[96];
    char name[96];
    uint64_t total, reserved, used, unattributed;
    uint32_t present, gpu_instance, compute_instance;
    uint32_t gpu_slices, compute_slices, unused;
    uint32_t numa_node, placement_start, placement_size, padding; /* UINT32_MAX: not supported */
    struct process_list lists[LIST_COUNT];
    /* By NVML's number of the metric, in its unit: what a pair of samples answers while nothing else happens
     * (a negative number: not supported), and what has happened, which counts once. */
    double gpm_level[MAX_GPM_METRICS], gpm_total[MAX_GPM_METRICS];
};

/* What a cgroup may take of a device, by the cgroup's whole path. */
struct limits {
    char cgroup[256];
    uint64_t soft, hard, used;
};

struct device {
    struct unit whole;
    struct unit instances[MAX_INSTANCES];
    char bus_id[32], serial[32];
    uint64_t throttle_reasons, energy, ecc[2], bar1_total, bar1_used, event_types;
    uint32_t minor, lost, mig_mode;
    uint32_t gpu_utilization, memory_utilization, encoder_utilization, decoder_utilization;
    uint32_t temperature, memory_temperature, recovery_action, power, power_limit, clocks[4], max_clocks[4];
    uint32_t performance_state, fan_speed, remapped_rows[4];
    uint32_t pcie_transmit, pcie_receive, pcie_generation, pcie_max_generation, pcie_width, pcie_max_width;
    uint32_t capability_major, capability_minor, persistence, gpm_supported, gpm_last_metric;
    uint32_t addressing_mode, virtualization_mode, limit_count, spare; /* UINT32_MAX: not supported */
    uint32_t gpu_utilization_peak, sample_count; /* the highest sample between two questions */
    struct utilization_sample samples[MAX_PROCESSES];
    struct limits limits[MAX_LIMITS];
};

struct event {
    uint64_t type, data;
    uint32_t device, gpu_instance, compute_instance, unused;
};

struct control {
    uint64_t calls[MAX_DEVICES + 1];
    uint64_t failed[MAX_DEVICES + 1]; /* calls that chaos has failed, and those whose answer it has spoiled */
    uint64_t spoiled[MAX_DEVICES + 1];
    uint32_t error[MAX_DEVICES + 1];
    uint32_t hang[MAX_DEVICES + 1];
    uint32_t latency_us, unused;
};

/* What goes wrong by chance: a stream of numbers, and shares of calls in 1/65536. */
struct chaos {
    uint64_t random; /* where the stream is; set it to begin anew */
    uint64_t codes;  /* bit n: NVML's code n may be answered; bit 63 is code 999 */
    uint64_t injected;
    uint32_t fail, spoil, grow, slow; /* errors, garbage, lists that have grown, calls that take slow_us */
    uint32_t slow_us, unused;
};

struct state {
    uint64_t magic;
    uint32_t version, size;
    uint32_t driver_error; /* answered by every function while not 0 */
    uint32_t driver_epoch; /* a reload: who initialised in another epoch is uninitialised */
    uint32_t device_count, cuda_version;
    char driver_version[96];
    uint32_t confidential, developer_tools; /* confidential computing: whether it is on, and for developers */
    uint64_t event_count; /* ever written; event n is at n % MAX_EVENTS */
    struct chaos chaos;
    struct event events[MAX_EVENTS];
    struct control controls[FUNCTION_COUNT];
    struct device devices[MAX_DEVICES];
};
