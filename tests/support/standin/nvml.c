/* A stand-in for libnvidia-ml.so.1: NVML's ABI over a state file that a test steers while programs run.
 *
 * The file is named by VRAMLEDGER_STANDIN and read anew at every call (layout: state.h). Symbols that
 * an old driver does not have are left out by the linker (library.py). With -DLEGACY_PROCESS_LAYOUT the
 * v3 process lists have the longer entries of the 535.43 drivers.
 */
#define _GNU_SOURCE
#include "state.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default"))) int

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999
};

static struct state *state; /* never unmapped: a hanging call of an earlier test may still look at it */
static char mapped_path[4096];
static int initialised;
static uint32_t epoch;

/* ---- state, handles, and what every call does first ---- */

static int map_state(void) {
    const char *path = getenv("VRAMLEDGER_STANDIN");
    struct stat facts;
    if (!path) {
        fprintf(stderr, "stand-in NVML: VRAMLEDGER_STANDIN names no state file\n");
        return UNKNOWN;
    }
    if (state && strcmp(path, mapped_path) == 0) return SUCCESS;
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0 || fstat(file, &facts) != 0) {
        fprintf(stderr, "stand-in NVML: cannot open the state file %s\n", path);
        return UNKNOWN;
    }
    struct state *fresh = MAP_FAILED;
    if ((size_t)facts.st_size == sizeof *fresh)
        fresh = mmap(NULL, sizeof *fresh, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (fresh == MAP_FAILED || fresh->magic != STATE_MAGIC || fresh->version != STATE_VERSION ||
        fresh->size != sizeof *fresh) {
        fprintf(stderr, "stand-in NVML: %s is no state file of this build (layout.py and state.h differ)\n", path);
        return UNKNOWN;
    }
    snprintf(mapped_path, sizeof mapped_path, "%s", path);
    state = fresh;
    return SUCCESS;
}

static uint64_t nanoseconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_us(uint32_t microseconds) {
    struct timespec span = {microseconds / 1000000, (long)(microseconds % 1000000) * 1000};
    nanosleep(&span, NULL);
}

/* A call of some µs is spent on the CPU, as the real library spends it; a longer one sleeps. */
static void delay(uint32_t microseconds) {
    static __thread int precise;
    if (microseconds < 50) {
        uint64_t end = nanoseconds(CLOCK_MONOTONIC) + microseconds * 1000u;
        while (nanoseconds(CLOCK_MONOTONIC) < end) {
        }
        return;
    }
    if (!precise) precise = prctl(PR_SET_TIMERSLACK, 1) == 0;
    sleep_us(microseconds);
}

#define HANDLES 0x5afe0000u
#define PER_DEVICE 16u /* handle of a GPU, then one for each of its instances */

static void *handle_of(unsigned device, unsigned instance) {
    return (void *)(uintptr_t)(HANDLES + device * PER_DEVICE + instance);
}

static int resolve(void *handle, unsigned *device, unsigned *instance) {
    uintptr_t number = (uintptr_t)handle - HANDLES;
    if ((uintptr_t)handle < HANDLES || number / PER_DEVICE >= state->device_count) return INVALID_ARGUMENT;
    *device = (unsigned)(number / PER_DEVICE);
    *instance = (unsigned)(number % PER_DEVICE);
    if (*instance > MAX_INSTANCES) return INVALID_ARGUMENT;
    struct device *found = &state->devices[*device];
    if (*instance && !(found->mig_mode && found->instances[*instance - 1].present)) return INVALID_ARGUMENT;
    return SUCCESS;
}

/* ---- chaos: errors, garbage, lists that grow, calls that take long, all by a seeded chance ---- */

static __thread uint64_t *spoiling; /* where to count that this call's answer was spoiled; NULL: it is not to be */
static __thread uint64_t *failing;

static uint64_t draw(void) {
    uint64_t number = __atomic_add_fetch(&state->chaos.random, 0x9e3779b97f4a7c15ull, __ATOMIC_RELAXED);
    number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9ull;
    number = (number ^ number >> 27) * 0x94d049bb133111ebull;
    return number ^ number >> 31;
}

static int chance(uint32_t share) { return share && (draw() & 0xffff) < share; }

static void inject(uint64_t *count) {
    __atomic_fetch_add(&state->chaos.injected, 1, __ATOMIC_RELAXED);
    if (count) __atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
}

static int chaos(struct control *control, unsigned device) {
    struct chaos *chaos = &state->chaos;
    spoiling = NULL;
    failing = &control->failed[device];
    if (chance(chaos->slow)) {
        inject(NULL);
        sleep_us(chaos->slow_us);
    }
    if (chaos->codes && chance(chaos->fail)) {
        unsigned bit = (unsigned)(draw() % (unsigned)__builtin_popcountll(chaos->codes));
        uint64_t codes = chaos->codes;
        while (bit--) codes &= codes - 1;
        inject(failing);
        return codes >> 63 && !(codes & (codes - 1)) ? UNKNOWN : __builtin_ctzll(codes);
    }
    if (chance(chaos->spoil)) spoiling = &control->spoiled[device];
    return SUCCESS;
}

/* Overwrite an answer with what no GPU says: never zeros, which nobody could tell from an answer. */
static void spoil(void *answer, size_t size) {
    if (!spoiling || !size) return;
    inject(spoiling);
    spoiling = NULL;
    uint64_t kind = draw() % 3;
    for (size_t i = 0; i < size; i++) {
        unsigned char byte = kind == 0 ? 0xff : kind == 1 ? (unsigned char)draw() : 0;
        ((unsigned char *)answer)[i] = i % 4 == 3 || i + 1 == size ? byte | 0x80 : byte;
    }
}

/* Say that a list has more entries than there is room for. */
static int grown(unsigned *count) {
    if (!chance(state->chaos.grow)) return 0;
    inject(failing);
    *count += draw() % 8 ? 1 + (unsigned)(draw() % 1000) : (unsigned)draw();
    return 1;
}

/* Count the call, wait as long as it shall take or hang, and say which error the test has asked for. */
static int steer(enum function function, unsigned device) {
    struct control *control = &state->controls[function];
    __atomic_fetch_add(&control->calls[device], 1, __ATOMIC_RELAXED);
    if (control->latency_us) delay(control->latency_us);
    while (__atomic_load_n(&control->hang[device], __ATOMIC_RELAXED) ||
           __atomic_load_n(&control->hang[ANY_DEVICE], __ATOMIC_RELAXED))
        sleep_us(1000);
    if (state->driver_error) return (int)state->driver_error;
    if (control->error[device]) return (int)control->error[device];
    if (control->error[ANY_DEVICE]) return (int)control->error[ANY_DEVICE];
    return chaos(control, device);
}

static int enter(enum function function) {
    if (!state) return UNINITIALIZED;
    int error = steer(function, ANY_DEVICE);
    if (error) return error;
    return initialised && epoch == state->driver_epoch ? SUCCESS : UNINITIALIZED;
}

static int enter_device(enum function function, void *handle, struct device **device, struct unit **unit) {
    unsigned index = ANY_DEVICE, instance = 0;
    if (!state) return UNINITIALIZED;
    int unknown = resolve(handle, &index, &instance);
    int error = steer(function, unknown ? ANY_DEVICE : index);
    if (error) return error;
    if (!initialised || epoch != state->driver_epoch) return UNINITIALIZED;
    /* Again, since the call may have hung while the test changed the devices. */
    unknown = resolve(handle, &index, &instance);
    if (unknown) return unknown;
    *device = &state->devices[index];
    *unit = instance ? &(*device)->instances[instance - 1] : &(*device)->whole;
    return (*device)->lost ? GPU_IS_LOST : SUCCESS;
}

#define SYSTEM(function)                               \
    do {                                               \
        int status_ = enter(number_##function);        \
        if (status_) return status_;                   \
    } while (0)

#define DEVICE(function)                                                          \
    struct device *device;                                                        \
    struct unit *unit;                                                            \
    do {                                                                          \
        int status_ = enter_device(number_##function, handle, &device, &unit);    \
        if (status_) return status_;                                              \
    } while (0)

/* Most questions about the hardware have no answer for a MIG instance. */
#define WHOLE(function) \
    DEVICE(function);   \
    if (unit != &device->whole) return NOT_SUPPORTED

#define ANSWER(function, type, expression)      \
    API function(void *handle, type *value) {   \
        WHOLE(function);                        \
        *value = (type)(expression);            \
        spoil(value, sizeof *value);            \
        return SUCCESS;                         \
    }

/* The question says which of several figures it means. */
#define CHOSEN(function, last, expression)                              \
    API function(void *handle, unsigned which, unsigned *value) {       \
        WHOLE(function);                                                \
        if (which > last) return INVALID_ARGUMENT;                      \
        *value = (expression);                                          \
        spoil(value, sizeof *value);                                    \
        return SUCCESS;                                                 \
    }

static int text(char *buffer, unsigned size, const char *value) {
    if (strlen(value) >= size) return INSUFFICIENT_SIZE;
    strcpy(buffer, value);
    spoil(buffer, size);
    return SUCCESS;
}

#define TEXT(function, question, value)                                 \
    API function(void *handle, char *buffer, unsigned size) {           \
        question(function);                                             \
        return text(buffer, size, value);                               \
    }

/* ---- library and system ---- */

static int init(enum function function) {
    int error = map_state();
    if (error) return error;
    error = steer(function, ANY_DEVICE);
    if (error && error != UNINITIALIZED) return error;
    epoch = state->driver_epoch;
    initialised++;
    return SUCCESS;
}

API nvmlInit(void) { return init(number_nvmlInit); }
API nvmlInit_v2(void) { return init(number_nvmlInit_v2); }
API nvmlInitWithFlags(unsigned flags) { return (void)flags, init(number_nvmlInitWithFlags); }

API nvmlShutdown(void) {
    SYSTEM(nvmlShutdown);
    initialised--;
    return SUCCESS;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(int error) {
    return error == SUCCESS ? "Success" : "An error of the stand-in";
}

API nvmlSystemGetDriverVersion(char *buffer, unsigned size) {
    SYSTEM(nvmlSystemGetDriverVersion);
    return text(buffer, size, state->driver_version);
}

API nvmlSystemGetNVMLVersion(char *buffer, unsigned size) {
    SYSTEM(nvmlSystemGetNVMLVersion);
    return text(buffer, size, state->driver_version);
}

#define OF_SYSTEM(function, type, expression)   \
    API function(type *value) {                 \
        SYSTEM(function);                       \
        *value = (type)(expression);            \
        spoil(value, sizeof *value);            \
        return SUCCESS;                         \
    }

OF_SYSTEM(nvmlSystemGetCudaDriverVersion, int, state->cuda_version)
OF_SYSTEM(nvmlSystemGetCudaDriverVersion_v2, int, state->cuda_version)

API nvmlSystemGetConfComputeState(unsigned *answer) {
    SYSTEM(nvmlSystemGetConfComputeState);
    answer[0] = 2 * state->confidential; /* the environment: production */
    answer[1] = state->confidential;
    answer[2] = state->developer_tools;
    spoil(answer, 3 * sizeof *answer);
    return SUCCESS;
}

/* ---- devices and their identity ---- */

OF_SYSTEM(nvmlDeviceGetCount_v2, unsigned, state->device_count)

static int find(enum function function, unsigned device, unsigned instance, void **handle) {
    struct device *found;
    struct unit *unit;
    *handle = handle_of(device, instance);
    return enter_device(function, *handle, &found, &unit);
}

API nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    return find(number_nvmlDeviceGetHandleByIndex_v2, index, 0, handle);
}

API nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (!state) return UNINITIALIZED;
    for (unsigned i = 0; i < state->device_count; i++) {
        struct device *device = &state->devices[i];
        if (strcmp(uuid, device->whole.uuid) == 0) return find(number_nvmlDeviceGetHandleByUUID, i, 0, handle);
        for (unsigned k = 0; device->mig_mode && k < MAX_INSTANCES; k++)
            if (device->instances[k].present && strcmp(uuid, device->instances[k].uuid) == 0)
                return find(number_nvmlDeviceGetHandleByUUID, i, k + 1, handle);
    }
    SYSTEM(nvmlDeviceGetHandleByUUID);
    return NOT_FOUND;
}

API nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **handle) {
    if (!state) return UNINITIALIZED;
    for (unsigned i = 0; i < state->device_count; i++)
        if (strcasecmp(bus_id, state->devices[i].bus_id) == 0)
            return find(number_nvmlDeviceGetHandleByPciBusId_v2, i, 0, handle);
    SYSTEM(nvmlDeviceGetHandleByPciBusId_v2);
    return NOT_FOUND;
}

TEXT(nvmlDeviceGetName, DEVICE, unit->name)
TEXT(nvmlDeviceGetUUID, DEVICE, unit->uuid)
TEXT(nvmlDeviceGetSerial, WHOLE, device->serial)

struct pci_info {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

API nvmlDeviceGetPciInfo_v3(void *handle, struct pci_info *info) {
    WHOLE(nvmlDeviceGetPciInfo_v3);
    memset(info, 0, sizeof *info);
    sscanf(device->bus_id, "%x:%x:%x", &info->domain, &info->bus, &info->device);
    snprintf(info->legacy, sizeof info->legacy, "%04x:%02x:%02x.0", info->domain & 0xffff, info->bus & 0xff,
             info->device & 0xff);
    memcpy(info->bus_id, device->bus_id, sizeof info->bus_id);
    spoil(info, sizeof *info);
    return SUCCESS;
}

ANSWER(nvmlDeviceGetIndex, unsigned, device - state->devices)
ANSWER(nvmlDeviceGetMinorNumber, unsigned, device->minor)

/* ---- memory and its holders ---- */

static int listed_before(const struct unit *unit, unsigned list, uint32_t position, uint64_t *largest) {
    uint32_t pid = unit->lists[list].entries[position].pid;
    int seen = 0;
    for (unsigned i = 0; i <= list; i++) {
        const struct process_list *other = &unit->lists[i];
        uint32_t end = i == list ? position : other->count;
        for (uint32_t k = 0; k < end && k < MAX_PROCESSES; k++) {
            if (other->entries[k].pid != pid) continue;
            if (!seen || other->entries[k].bytes > *largest) *largest = other->entries[k].bytes;
            seen = 1;
        }
    }
    return seen;
}

/* Bytes in use. A pid of several lists (MPS clients are in two) has its bytes once. */
static uint64_t used_bytes(const struct unit *unit) {
    if (unit->used != DERIVED) return unit->used;
    uint64_t sum = unit->unattributed;
    for (unsigned list = 0; list < LIST_COUNT; list++) {
        for (uint32_t i = 0; i < unit->lists[list].count && i < MAX_PROCESSES; i++) {
            uint64_t bytes = unit->lists[list].entries[i].bytes, before = 0;
            if (bytes == UINT64_MAX) continue;
            if (list == COMPUTE || !listed_before(unit, list, i, &before))
                sum += bytes;
            else if (before != UINT64_MAX && bytes > before)
                sum += bytes - before;
        }
    }
    return sum;
}

struct memory_v1 {
    unsigned long long total, free, used;
};

/* Version 1 counts the driver's reserve as used. */
API nvmlDeviceGetMemoryInfo(void *handle, struct memory_v1 *memory) {
    DEVICE(nvmlDeviceGetMemoryInfo);
    memory->total = unit->total;
    memory->used = used_bytes(unit) + unit->reserved;
    memory->free = unit->total - memory->used;
    spoil(memory, sizeof *memory);
    return SUCCESS;
}

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

API nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory) {
    DEVICE(nvmlDeviceGetMemoryInfo_v2);
    if (memory->version != (sizeof *memory | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    memory->total = unit->total;
    memory->reserved = unit->reserved;
    memory->used = used_bytes(unit);
    memory->free = unit->total - unit->reserved - memory->used;
    spoil(&memory->total, sizeof *memory - offsetof(struct memory_v2, total));
    return SUCCESS;
}

API nvmlDeviceGetBAR1MemoryInfo(void *handle, struct memory_v1 *memory) {
    WHOLE(nvmlDeviceGetBAR1MemoryInfo);
    memory->total = device->bar1_total;
    memory->used = device->bar1_used;
    memory->free = memory->total - memory->used;
    spoil(memory, sizeof *memory);
    return SUCCESS;
}

API nvmlDeviceGetConfComputeMemSizeInfo(void *handle, unsigned long long *sizes) {
    WHOLE(nvmlDeviceGetConfComputeMemSizeInfo);
    sizes[0] = 0;
    sizes[1] = unit->total / 1024;
    return SUCCESS;
}

struct process_v1 {
    unsigned pid;
    unsigned long long bytes;
};

struct process_v2 {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

struct process_legacy {
    struct process_v2 process;
    unsigned long long protected_bytes;
};

#ifdef LEGACY_PROCESS_LAYOUT
typedef struct process_legacy process_v3;
#else
typedef struct process_v2 process_v3;
#endif

static int list_processes(struct unit *unit, enum list which, unsigned *count, void *entries, size_t size) {
    struct process_list *list = &unit->lists[which];
    unsigned room = *count, listed = list->count;
    *count = listed;
    if (grown(count)) return INSUFFICIENT_SIZE;
    if (listed > room) {
        if (list->count_after_size_question) list->count = list->count_after_size_question;
        list->count_after_size_question = 0;
        return INSUFFICIENT_SIZE;
    }
    for (unsigned i = 0; i < listed; i++) {
        struct process_legacy entry = {{list->entries[i].pid, list->entries[i].bytes, unit->gpu_instance,
                                        unit->compute_instance}, 0};
        memcpy((char *)entries + i * size, &entry, size);
    }
    if (spoiling && (!listed || draw() % 4 == 0))
        spoil(count, sizeof *count);
    else
        spoil(entries, listed * size);
    return SUCCESS;
}

#define PROCESS_LIST(function, which, type)                                         \
    API function(void *handle, unsigned *count, void *entries) {                    \
        DEVICE(function);                                                           \
        return list_processes(unit, which, count, entries, sizeof(type));           \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, COMPUTE, struct process_v1)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE, struct process_v2)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE, process_v3)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS, struct process_v1)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS, struct process_v2)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS, process_v3)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, MPS, struct process_v1)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, MPS, struct process_v2)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS, process_v3)

API nvmlDeviceGetRunningProcessDetailList(void *handle, void *list) {
    DEVICE(nvmlDeviceGetRunningProcessDetailList);
    (void)list;
    return NOT_SUPPORTED;
}

struct process_sample {
    unsigned pid;
    unsigned long long timestamp;
    unsigned sm, memory, encoder, decoder;
};

API nvmlDeviceGetProcessUtilization(void *handle, struct process_sample *samples, unsigned *count,
                                    unsigned long long last_seen) {
    WHOLE(nvmlDeviceGetProcessUtilization);
    unsigned room = samples ? *count : 0, listed = 0;
    uint64_t now = nanoseconds(CLOCK_REALTIME) / 1000;
    for (unsigned i = 0; i < device->sample_count; i++) {
        struct utilization_sample *from = &device->samples[i];
        if (from->timestamp && from->timestamp <= last_seen) continue;
        if (listed < room)
            samples[listed] = (struct process_sample){from->pid, from->timestamp ? from->timestamp : now,
                                                      from->sm, from->memory, from->encoder, from->decoder};
        listed++;
    }
    *count = listed;
    if (grown(count)) return INSUFFICIENT_SIZE;
    if (!listed) return NOT_FOUND;
    if (listed > room) return INSUFFICIENT_SIZE;
    spoil(samples, listed * sizeof *samples);
    return SUCCESS;
}

/* ---- hardware ---- */

struct utilization {
    unsigned gpu, memory;
};

API nvmlDeviceGetUtilizationRates(void *handle, struct utilization *utilization) {
    WHOLE(nvmlDeviceGetUtilizationRates);
    if (device->mig_mode) return NOT_SUPPORTED;
    *utilization = (struct utilization){device->gpu_utilization, device->memory_utilization};
    spoil(utilization, sizeof *utilization);
    return SUCCESS;
}

struct sample {
    unsigned long long timestamp, value;
};

/* The driver's log of the whole GPU's utilisation (kind 1): a peak half a second ago, and what is now. */
API nvmlDeviceGetSamples(void *handle, unsigned kind, unsigned long long last_seen, unsigned *type,
                         unsigned *count, struct sample *samples) {
    WHOLE(nvmlDeviceGetSamples);
    if (device->mig_mode || kind != 1) return NOT_SUPPORTED;
    unsigned room = samples ? *count : 0;
    uint64_t now = nanoseconds(CLOCK_REALTIME) / 1000;
    if (last_seen >= now) return NOT_FOUND;
    *type = 1;
    *count = 2;
    if (!samples) return SUCCESS;
    if (room < 2) return INSUFFICIENT_SIZE;
    unsigned peak = device->gpu_utilization_peak;
    samples[0] = (struct sample){now - 1, peak > device->gpu_utilization ? peak : device->gpu_utilization};
    samples[1] = (struct sample){now, device->gpu_utilization};
    spoil(samples, 2 * sizeof *samples);
    return SUCCESS;
}

#define CODER(function, field)                                                 \
    API function(void *handle, unsigned *utilization, unsigned *period_us) {   \
        WHOLE(function);                                                       \
        *utilization = device->field;                                          \
        *period_us = 167000;                                                   \
        spoil(utilization, sizeof *utilization);                               \
        return SUCCESS;                                                        \
    }

CODER(nvmlDeviceGetEncoderUtilization, encoder_utilization)
CODER(nvmlDeviceGetDecoderUtilization, decoder_utilization)

CHOSEN(nvmlDeviceGetTemperature, 0, device->temperature)

struct temperature {
    unsigned version, sensor;
    int celsius;
};

API nvmlDeviceGetTemperatureV(void *handle, struct temperature *temperature) {
    WHOLE(nvmlDeviceGetTemperatureV);
    if (temperature->version != (sizeof *temperature | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    temperature->celsius = (int)device->temperature;
    spoil(&temperature->celsius, sizeof temperature->celsius);
    return SUCCESS;
}

ANSWER(nvmlDeviceGetPowerUsage, unsigned, device->power)
ANSWER(nvmlDeviceGetPowerManagementLimit, unsigned, device->power_limit)
ANSWER(nvmlDeviceGetEnforcedPowerLimit, unsigned, device->power_limit)
ANSWER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, device->energy)
ANSWER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, device->throttle_reasons)
ANSWER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, device->throttle_reasons)
ANSWER(nvmlDeviceGetPerformanceState, unsigned, device->performance_state)
ANSWER(nvmlDeviceGetFanSpeed, unsigned, device->fan_speed)
ANSWER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, device->pcie_generation)
ANSWER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, device->pcie_max_generation)
ANSWER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, device->pcie_width)
ANSWER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, device->pcie_max_width)
ANSWER(nvmlDeviceGetPersistenceMode, unsigned, device->persistence)
ANSWER(nvmlDeviceGetAccountingMode, unsigned, 0)
ANSWER(nvmlDeviceGetDisplayMode, unsigned, 0)
ANSWER(nvmlDeviceGetDisplayActive, unsigned, 0)
ANSWER(nvmlDeviceGetComputeMode, unsigned, 0)

CHOSEN(nvmlDeviceGetClockInfo, 3, device->clocks[which])
CHOSEN(nvmlDeviceGetMaxClockInfo, 3, device->max_clocks[which])
CHOSEN(nvmlDeviceGetPcieThroughput, 1, which ? device->pcie_receive : device->pcie_transmit) /* KiB/s */

API nvmlDeviceGetTotalEccErrors(void *handle, unsigned type, unsigned counter, unsigned long long *errors) {
    WHOLE(nvmlDeviceGetTotalEccErrors);
    if (type > 1) return INVALID_ARGUMENT;
    *errors = counter ? device->ecc[type] : 0;
    spoil(errors, sizeof *errors);
    return SUCCESS;
}

API nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
    WHOLE(nvmlDeviceGetRemappedRows);
    *corrected = device->remapped_rows[0];
    *uncorrected = device->remapped_rows[1];
    *pending = device->remapped_rows[2];
    *failed = device->remapped_rows[3];
    if (spoiling) {
        spoil(corrected, sizeof *corrected);
        *uncorrected = *pending = *failed = *corrected;
    }
    return SUCCESS;
}

struct field_value {
    unsigned field, scope;
    long long timestamp, latency_us;
    unsigned type, status;
    union {
        double real;
        unsigned natural;
        unsigned long long large;
    } value;
};

/* Known fields: 82 memory temperature, 230 recovery action, 91 count of NVLinks, 185 and 186 power. */
API nvmlDeviceGetFieldValues(void *handle, int count, struct field_value *values) {
    WHOLE(nvmlDeviceGetFieldValues);
    for (int i = 0; i < count; i++) {
        values[i].timestamp = (long long)(nanoseconds(CLOCK_REALTIME) / 1000);
        values[i].type = 1;
        values[i].status = SUCCESS;
        values[i].value.large = 0;
        if (values[i].field == 82)
            values[i].value.natural = device->memory_temperature;
        else if (values[i].field == 230)
            values[i].value.natural = device->recovery_action;
        else if (values[i].field == 185 || values[i].field == 186)
            values[i].value.natural = device->power;
        else if (values[i].field != 91)
            values[i].status = NOT_SUPPORTED;
    }
    if (count > 0) spoil(&values[0].type, sizeof values[0] - offsetof(struct field_value, type));
    return SUCCESS;
}

#define DRIVER_MODEL(function) /* Windows only */                           \
    API function(void *handle, unsigned *current, unsigned *pending) {      \
        WHOLE(function);                                                    \
        (void)current, (void)pending;                                       \
        return NOT_SUPPORTED;                                               \
    }

DRIVER_MODEL(nvmlDeviceGetDriverModel)
DRIVER_MODEL(nvmlDeviceGetDriverModel_v2)

API nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    DEVICE(nvmlDeviceGetCudaComputeCapability);
    *major = (int)device->capability_major;
    *minor = (int)device->capability_minor;
    return SUCCESS;
}

#define OPTIONAL(function, source)                           \
    API function(void *handle, unsigned *value) {           \
        DEVICE(function);                                   \
        if ((source) == UINT32_MAX) return NOT_SUPPORTED;   \
        *value = (source);                                  \
        spoil(value, sizeof *value);                        \
        return SUCCESS;                                     \
    }

OPTIONAL(nvmlDeviceGetNumaNodeId, unit->numa_node)
OPTIONAL(nvmlDeviceGetVirtualizationMode, device->virtualization_mode)

struct addressing_mode {
    unsigned version, value;
};

API nvmlDeviceGetAddressingMode(void *handle, struct addressing_mode *mode) {
    DEVICE(nvmlDeviceGetAddressingMode);
    if (mode->version != (sizeof *mode | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    if (device->addressing_mode == UINT32_MAX) return NOT_SUPPORTED;
    mode->value = device->addressing_mode;
    spoil(&mode->value, sizeof mode->value);
    return SUCCESS;
}

struct memory_limits {
    const char *cgroup;
    unsigned long long soft, hard, used;
};

API nvmlDeviceGetMemoryLimits_v1(void *handle, struct memory_limits *limits) {
    WHOLE(nvmlDeviceGetMemoryLimits_v1);
    if (!limits->cgroup) return INVALID_ARGUMENT;
    limits->soft = limits->used = 0;
    limits->hard = UINT64_MAX;
    for (unsigned i = 0; i < device->limit_count && i < MAX_LIMITS; i++)
        if (strcmp(limits->cgroup, device->limits[i].cgroup) == 0) {
            limits->soft = device->limits[i].soft;
            limits->hard = device->limits[i].hard;
            limits->used = device->limits[i].used;
        }
    spoil(&limits->soft, sizeof *limits - offsetof(struct memory_limits, soft));
    return SUCCESS;
}

/* ---- MIG ---- */

struct placement {
    unsigned start, size;
};

struct instance_info {
    void *device;
    unsigned id, profile;
    struct placement placement;
};

/* The handle of a GPU instance is that of the first unit on it. */
API nvmlDeviceGetGpuInstanceById(void *handle, unsigned id, void **instance) {
    WHOLE(nvmlDeviceGetGpuInstanceById);
    for (unsigned i = 0; device->mig_mode && i < MAX_INSTANCES; i++)
        if (device->instances[i].present && device->instances[i].gpu_instance == id) {
            *instance = handle_of((unsigned)(device - state->devices), i + 1);
            return SUCCESS;
        }
    return NOT_FOUND;
}

API nvmlGpuInstanceGetInfo(void *handle, struct instance_info *info) {
    DEVICE(nvmlGpuInstanceGetInfo);
    if (unit == &device->whole) return INVALID_ARGUMENT;
    if (unit->placement_start == UINT32_MAX) return NOT_SUPPORTED;
    *info = (struct instance_info){handle_of((unsigned)(device - state->devices), 0), unit->gpu_instance, 0,
                                   {unit->placement_start, unit->placement_size}};
    spoil(&info->id, sizeof *info - offsetof(struct instance_info, id));
    return SUCCESS;
}

API nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    WHOLE(nvmlDeviceGetMigMode);
    *current = *pending = device->mig_mode;
    spoil(current, sizeof *current);
    return SUCCESS;
}

ANSWER(nvmlDeviceGetMaxMigDeviceCount, unsigned, MAX_INSTANCES - 1)

API nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance) {
    WHOLE(nvmlDeviceGetMigDeviceHandleByIndex);
    if (index >= MAX_INSTANCES) return INVALID_ARGUMENT;
    if (!device->mig_mode || !device->instances[index].present) return NOT_FOUND;
    *instance = handle_of((unsigned)(device - state->devices), index + 1);
    return SUCCESS;
}

API nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **parent) {
    DEVICE(nvmlDeviceGetDeviceHandleFromMigDeviceHandle);
    if (unit == &device->whole) return INVALID_ARGUMENT;
    *parent = handle_of((unsigned)(device - state->devices), 0);
    return SUCCESS;
}

API nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *answer) {
    DEVICE(nvmlDeviceIsMigDeviceHandle);
    *answer = unit != &device->whole;
    return SUCCESS;
}

OPTIONAL(nvmlDeviceGetGpuInstanceId, unit->gpu_instance)
OPTIONAL(nvmlDeviceGetComputeInstanceId, unit->compute_instance)

struct attributes {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices, compute_slices;
    unsigned long long megabytes;
};

API nvmlDeviceGetAttributes_v2(void *handle, struct attributes *attributes) {
    DEVICE(nvmlDeviceGetAttributes_v2);
    if (unit == &device->whole) return NOT_SUPPORTED;
    memset(attributes, 0, sizeof *attributes);
    attributes->multiprocessors = 16 * unit->compute_slices;
    attributes->gpu_slices = unit->gpu_slices;
    attributes->compute_slices = unit->compute_slices;
    attributes->megabytes = unit->total >> 20;
    spoil(attributes, sizeof *attributes);
    return SUCCESS;
}

/* ---- GPM: cumulative counters, two samples of which give what happened in between ---- */

struct gpm_support {
    unsigned version, supported;
};

struct gpm_sample {
    double level[MAX_GPM_METRICS], total[MAX_GPM_METRICS];
};

struct gpm_metric {
    unsigned number, status;
    double value;
    const char *texts[3];
};

struct gpm_request {
    unsigned version, count;
    struct gpm_sample *before, *after;
    struct gpm_metric metrics[];
};

API nvmlGpmQueryDeviceSupport(void *handle, struct gpm_support *support) {
    WHOLE(nvmlGpmQueryDeviceSupport);
    if (support->version != 1) return ARGUMENT_VERSION_MISMATCH;
    support->supported = device->gpm_supported;
    return SUCCESS;
}

API nvmlGpmSampleAlloc(struct gpm_sample **sample) {
    SYSTEM(nvmlGpmSampleAlloc);
    *sample = calloc(1, sizeof **sample);
    return SUCCESS;
}

API nvmlGpmSampleFree(struct gpm_sample *sample) {
    SYSTEM(nvmlGpmSampleFree);
    free(sample);
    return SUCCESS;
}

static int take_gpm_sample(struct device *device, struct unit *unit, struct gpm_sample *sample) {
    if (!device->gpm_supported) return NOT_SUPPORTED;
    memcpy(sample->level, unit->gpm_level, sizeof sample->level);
    memcpy(sample->total, unit->gpm_total, sizeof sample->total);
    return SUCCESS;
}

API nvmlGpmSampleGet(void *handle, struct gpm_sample *sample) {
    WHOLE(nvmlGpmSampleGet);
    return take_gpm_sample(device, unit, sample);
}

API nvmlGpmMigSampleGet(void *handle, unsigned gpu_instance, struct gpm_sample *sample) {
    WHOLE(nvmlGpmMigSampleGet);
    for (unsigned i = 0; i < MAX_INSTANCES; i++) {
        struct unit *instance = &device->instances[i];
        if (device->mig_mode && instance->present && instance->gpu_instance == gpu_instance)
            return take_gpm_sample(device, instance, sample);
    }
    return INVALID_ARGUMENT;
}

API nvmlGpmMetricsGet(struct gpm_request *request) {
    SYSTEM(nvmlGpmMetricsGet);
    if (request->version != 1) return ARGUMENT_VERSION_MISMATCH;
    uint32_t last = state->devices[0].gpm_last_metric;
    for (unsigned i = 0; i < request->count; i++)
        if (request->metrics[i].number > last) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < request->count; i++) {
        struct gpm_metric *metric = &request->metrics[i];
        double level = request->after->level[metric->number];
        metric->status = level < 0 ? NOT_SUPPORTED : SUCCESS;
        metric->value = level + request->after->total[metric->number] - request->before->total[metric->number];
        spoil(&metric->value, sizeof metric->value);
    }
    return SUCCESS;
}

/* ---- events ---- */

struct event_set {
    uint64_t position, types[MAX_DEVICES];
};

struct event_data {
    void *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

API nvmlEventSetCreate(struct event_set **set) {
    SYSTEM(nvmlEventSetCreate);
    *set = calloc(1, sizeof **set);
    (*set)->position = state->event_count;
    return SUCCESS;
}

API nvmlEventSetFree(struct event_set *set) {
    SYSTEM(nvmlEventSetFree);
    free(set);
    return SUCCESS;
}

ANSWER(nvmlDeviceGetSupportedEventTypes, unsigned long long, device->event_types)

API nvmlDeviceRegisterEvents(void *handle, unsigned long long types, struct event_set *set) {
    WHOLE(nvmlDeviceRegisterEvents);
    if (types & ~device->event_types) return NOT_SUPPORTED;
    set->types[device - state->devices] |= types;
    return SUCCESS;
}

API nvmlEventSetWait_v2(struct event_set *set, struct event_data *data, unsigned timeout_ms) {
    SYSTEM(nvmlEventSetWait_v2);
    uint64_t end = nanoseconds(CLOCK_MONOTONIC) + timeout_ms * 1000000ull;
    for (;;) {
        while (set->position < __atomic_load_n(&state->event_count, __ATOMIC_ACQUIRE)) {
            struct event *event = &state->events[set->position++ % MAX_EVENTS];
            if (!(set->types[event->device] & event->type)) continue;
            *data = (struct event_data){handle_of(event->device, 0), event->type, event->data,
                                        event->gpu_instance, event->compute_instance};
            return SUCCESS;
        }
        if (state->driver_error) return (int)state->driver_error;
        if (epoch != state->driver_epoch) return UNINITIALIZED;
        if (nanoseconds(CLOCK_MONOTONIC) >= end) return TIMEOUT;
        sleep_us(20000); /* a look each ms took 17 ms of CPU a second, more than the exporter itself */
    }
}
