/* A stand-in for NVIDIA's management library, compiled once per kind of trouble (-DVERSION_MISMATCH, -DGPU_LOST ...) and loaded by the tests the way the
 * real one is. Only what the telemetry asks for is here. Names, numbers and layouts are those of nvml.h. */

#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18 };

typedef int nvmlReturn_t;
typedef struct device {
    const char *uuid, *name, *bus_id;
    unsigned long long used;
    int readings;
    struct device *instance;
} *nvmlDevice_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { char busIdLegacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } nvmlPciInfo_t;

static struct device instance = {"MIG-5c89fb0b-0000-0000-0000-000000000001", "Fake A100 MIG 1g.5gb", "", 1ULL << 29, 0, NULL};
/* Listed in another order than their bus ids. */
static struct device devices[] = {
    {"GPU-bbbbbbbb-0000-0000-0000-000000000000", "Fake A100", "00000000:81:00.0", 2ULL << 30, 0, NULL},
    {"GPU-aaaaaaaa-0000-0000-0000-000000000000", "Fake A100", "00000000:17:00.0", 1ULL << 30, 0, NULL},
};
enum { COUNT = sizeof devices / sizeof devices[0] };

nvmlReturn_t nvmlInit_v2(void) {
#if defined(VERSION_MISMATCH)
    return LIB_RM_VERSION_MISMATCH;
#elif defined(NO_DRIVER)
    return DRIVER_NOT_LOADED;
#else
#ifdef MIG
    devices[0].instance = &instance;
#endif
    return SUCCESS;
#endif
}

#ifndef WITHOUT_SHUTDOWN
nvmlReturn_t nvmlShutdown(void) { return SUCCESS; }
#endif

nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned length) { return snprintf(text, length, "535.104.05") > 0 ? SUCCESS : NOT_FOUND; }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    *count = COUNT;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    if (index >= COUNT) return NOT_FOUND;
#ifdef ONE_BROKEN
    if (index == 0) return GPU_IS_LOST;
#endif
    *device = &devices[index];
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    for (int index = 0; index < COUNT; index++) {
        if (strcmp(uuid, devices[index].uuid) == 0) {
            *device = &devices[index];
#ifdef GPU_LOST
            if (devices[index].readings++ > 0 && index == 0) return GPU_IS_LOST;
#endif
            return SUCCESS;
        }
    }
    if (strcmp(uuid, instance.uuid) == 0) {
        *device = &instance;
        return SUCCESS;
    }
    return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length) {
    snprintf(text, length, "%s", device->uuid);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned length) {
    snprintf(text, length, "%s", device->name);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
    memset(info, 0, sizeof *info);
    snprintf(info->busId, sizeof info->busId, "%s", device->bus_id);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
#ifdef MIG
    *current = *pending = device->instance != NULL;
    return SUCCESS;
#else
    return NOT_SUPPORTED;
#endif
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    *count = 7;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *found) {
    /* The first slot is empty. */
    if (index != 1 || device->instance == NULL) return NOT_FOUND;
    *found = device->instance;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
#if defined(NOT_PERMITTED)
    return NO_PERMISSION;
#elif defined(UNKNOWN_CODE)
    return 4711;
#else
    if (device == &instance) return NOT_SUPPORTED;
#ifdef ALL_ONES
    rates->gpu = rates->memory = ~0u;
#else
    rates->gpu = 42;
    rates->memory = 7;
#endif
    return SUCCESS;
#endif
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    if (memory->version != (sizeof *memory | 2u << 24)) return NOT_FOUND;
    memory->total = 16ULL << 30;
    memory->used = device->used;
    memory->free = memory->total - memory->used;
    memory->reserved = 0;
#ifdef ALL_ONES
    memory->used = ~0ULL;
    if (device == &devices[1]) memory->total = ~0ULL;
#endif
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts) {
#if defined(NOT_PERMITTED)
    return NO_PERMISSION;
#elif defined(UNSUPPORTED)
    return NOT_SUPPORTED;
#else
    *milliwatts = 70500;
#ifdef ALL_ONES
    *milliwatts = ~0u;
#endif
    return SUCCESS;
#endif
}

#ifndef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *degrees) {
#ifdef NOT_PERMITTED
    return NO_PERMISSION;
#else
    *degrees = 61;
#ifdef ALL_ONES
    *degrees = ~0u;
#endif
    return SUCCESS;
#endif
}
#endif
