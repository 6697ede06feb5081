// NVIDIA's management library (libnvidia-ml) for the devices of the runtime on host memory: each a quarter busy.
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {
unsigned count() {
    const char *text = getenv("HOST_CUDA_DEVICES");
    return text ? static_cast<unsigned>(atoi(text)) : 1;
}
size_t number_of(void *handle) { return reinterpret_cast<size_t>(handle) - 1; }
}  // namespace

extern "C" {
struct Utilization {
    unsigned gpu, memory;
};
struct Memory {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
const char *nvmlErrorString(int) { return "an error"; }
int nvmlDeviceGetCount_v2(unsigned *out) {
    *out = count();
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **handle) {
    if (number >= count()) return 2;
    *handle = reinterpret_cast<void *>(size_t(number) + 1);
    return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
    unsigned at = 0;
    return sscanf(bus, "0000:%02x:00.0", &at) == 1 && at ? nvmlDeviceGetHandleByIndex_v2(at - 1, handle) : 6;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
    snprintf(text, length, "GPU-%zu", number_of(handle));
    return 0;
}
int nvmlDeviceGetName(void *, char *text, unsigned length) {
    snprintf(text, length, "host memory");
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *, Utilization *out) {
    *out = {25, 3};
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *, Memory *out) {
    *out = {out->version, 4ull << 30, 1 << 20, 3ull << 30, 1ull << 30};
    return 0;
}
int nvmlDeviceGetPowerUsage(void *, unsigned *milliwatts) {
    *milliwatts = 312500;
    return 0;
}
int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *milliwatts) {
    if (number_of(handle)) return 3;  // not supported
    *milliwatts = 700000;
    return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *, unsigned long long *millijoules) {
    static unsigned long long taken = 5000000;
    *millijoules = taken += 1000;
    return 0;
}
}
