/* What Slurm's plugin gpu/nvml calls and the stand-in driver does not have, as an H200 without NVLink and
   with fixed clocks. */
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "an error"; }

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    (void)device;
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetCpuAffinity(void *device, unsigned size, unsigned long *set) {
    (void)device;
    for (unsigned i = 0; i < size; i++) set[i] = 0;
    set[0] = (1ul << sysconf(_SC_NPROCESSORS_ONLN)) - 1; /* Slurm 22.05 refuses a CPU that this machine does not have */
    return SUCCESS;
}

#define WITHOUT(name)                                                                                                \
    int name(void) { return NOT_SUPPORTED; }
WITHOUT(nvmlDeviceGetNvLinkState)
WITHOUT(nvmlDeviceGetNvLinkRemotePciInfo_v2)
WITHOUT(nvmlDeviceGetApplicationsClock)
WITHOUT(nvmlDeviceGetSupportedGraphicsClocks)
WITHOUT(nvmlDeviceGetSupportedMemoryClocks)
WITHOUT(nvmlDeviceResetApplicationsClocks)
WITHOUT(nvmlDeviceResetGpuLockedClocks)
WITHOUT(nvmlDeviceResetMemoryLockedClocks)
WITHOUT(nvmlDeviceSetApplicationsClocks)
WITHOUT(nvmlDeviceSetGpuLockedClocks)
WITHOUT(nvmlDeviceSetMemoryLockedClocks)
