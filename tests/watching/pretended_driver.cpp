// What NVIDIA's driver would answer on a machine with one card: just enough of NVML's functions for
// nvidia-ml-py, which loads this in the place of libnvidia-ml.so.1. One question has no answer, as
// on a card without that sensor, and the second card is lost.
#include <cstring>

typedef int Return;  // 0: success; 3: not supported; 15: the card is lost
typedef void* Card;

struct Utilization { unsigned gpu, memory; };
struct Memory { unsigned version; unsigned long long total, reserved, free, used; };
struct Pci { char old[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };

static Return text(char* answer, const char* words) { std::strcpy(answer, words); return 0; }
static Return number(unsigned* answer, unsigned value) { *answer = value; return 0; }

extern "C" {
Return nvmlInitWithFlags(unsigned) { return 0; }
Return nvmlShutdown() { return 0; }
Return nvmlDeviceGetCount_v2(unsigned* count) { return number(count, 2); }
Return nvmlDeviceGetHandleByIndex_v2(unsigned index, Card* card) {
    *card = (Card)(long)(index + 1);
    return index ? 15 : 0;
}
Return nvmlDeviceGetPciInfo_v3(Card, Pci* pci) { return text(pci->bus_id, "00000000:65:00.0"); }
Return nvmlDeviceGetUUID(Card, char* uuid, unsigned) { return text(uuid, "GPU-pretended"); }
Return nvmlDeviceGetName(Card, char* name, unsigned) { return text(name, "A pretended card"); }
Return nvmlDeviceGetClockInfo(Card, int kind, unsigned* mhz) {
    return number(mhz, kind == 1 ? 1410 : kind == 2 ? 1593 : 0);
}
Return nvmlDeviceGetTemperature(Card, int, unsigned* celsius) { return number(celsius, 61); }
Return nvmlDeviceGetPowerUsage(Card, unsigned* milliwatt) { return number(milliwatt, 287500); }
Return nvmlDeviceGetTotalEnergyConsumption(Card, unsigned long long*) { return 3; }
Return nvmlDeviceGetUtilizationRates(Card, Utilization* share) {
    *share = {97, 41};
    return 0;
}
Return nvmlDeviceGetMemoryInfo_v2(Card, Memory* memory) {
    const unsigned long long mib = 1 << 20;
    *memory = {memory->version, 81920 * mib, 600 * mib, 10320 * mib, 71000 * mib};
    return 0;
}
}
