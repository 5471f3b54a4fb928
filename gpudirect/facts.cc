// Asks a device what it can do.
#include "gpudirect/facts.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

namespace baton::gpudirect {

std::optional<int> DeviceFacts::value(DeviceAttribute attribute) const {
  for (size_t i = 0; i < kFactNames.size(); ++i) {
    if (kFactNames[i].attribute == attribute) return values[i];
  }
  return std::nullopt;
}

std::string DeviceFacts::json() const {
  std::string out = absl::StrFormat(
      R"({"ordinal": %d, "name": "%s", "pci": "%s", "memory_bytes": %u, "driver_version": %d)",
      ordinal, absl::StrReplaceAll(name, {{"\\", "\\\\"}, {"\"", "\\\""}}), pci, memory_bytes,
      driver_version);
  for (size_t i = 0; i < kFactNames.size(); ++i) {
    absl::StrAppendFormat(&out, R"(, "%s": %s)", kFactNames[i].name,
                          values[i].has_value() ? absl::StrCat(*values[i]) : "null");
  }
  absl::StrAppendFormat(&out, R"(, "writes_of_adapters": "%s"})", words(flush_policy(*this)));
  return out;
}

absl::StatusOr<DeviceFacts> query_facts(const Driver& driver, int ordinal) {
  DeviceFacts facts{.ordinal = ordinal, .driver_version = driver.version};
  int count = 0;
  if (absl::Status status = driver_status(driver, driver.cuDeviceGetCount(&count), "counting GPUs");
      !status.ok()) {
    return status;
  }
  if (ordinal < 0 || ordinal >= count) {
    return absl::NotFoundError(absl::StrFormat(
        "there is no CUDA device %d: this process sees %d, from 0 on (CUDA_VISIBLE_DEVICES)",
        ordinal, count));
  }
  const std::string what = absl::StrCat("asking CUDA device ", ordinal, " for its facts");
  int device = 0;
  std::array<char, 128> name{};
  std::array<char, 32> pci{};
  for (const Result result :
       {driver.cuDeviceGet(&device, ordinal),
        driver.cuDeviceGetName(name.data(), static_cast<int>(name.size()), device),
        driver.cuDeviceGetPCIBusId(pci.data(), static_cast<int>(pci.size()), device),
        driver.cuDeviceTotalMem(&facts.memory_bytes, device)}) {
    if (result != kSuccess) return driver_status(driver, result, what);
  }
  facts.name = name.data();
  facts.pci = pci.data();
  std::transform(facts.pci.begin(), facts.pci.end(), facts.pci.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (size_t i = 0; i < kFactNames.size(); ++i) {
    int value = 0;
    const Result result = driver.cuDeviceGetAttribute(&value, kFactNames[i].attribute, device);
    if (result == kSuccess) {
      facts.values[i] = value;
    } else if (result != kInvalidValue) {  // which means: an attribute of newer drivers
      return driver_status(driver, result, what);
    }
  }
  return facts;
}

FlushPolicy flush_policy(const DeviceFacts& facts) {
  if (facts.value(kRdmaWritesOrdering).value_or(kOrderedForNobody) >= kOrderedForOwner) {
    return FlushPolicy::kNone;
  }
  const int options = facts.value(kRdmaFlushWritesOptions).value_or(0);
  return (options & kFlushByHost) != 0 ? FlushPolicy::kCall : FlushPolicy::kImpossible;
}

const char* words(FlushPolicy policy) {
  switch (policy) {
    case FlushPolicy::kNone:
      return "ordered";
    case FlushPolicy::kCall:
      return "flushed by a call";
    case FlushPolicy::kImpossible:
      break;
  }
  return "not ordered and not flushed: staged";
}

absl::Status can_be_ordered(const Driver& driver, const DeviceFacts& facts) {
  const FlushPolicy policy = flush_policy(facts);
  const bool lacking = driver.cuFlushGPUDirectRDMAWrites == nullptr;
  if (policy == FlushPolicy::kNone || (policy == FlushPolicy::kCall && !lacking)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("no dma-buf: CUDA device ", facts.ordinal,
                   " may see writes of adapters late, and its driver offers no flush to the host"));
}

absl::Status reachable_by_adapters(const Driver& driver, const DeviceFacts& facts) {
  if (driver.cuMemGetHandleForAddressRange == nullptr) {
    return absl::UnimplementedError(
        "no dma-buf: the CUDA driver is older than 11.7; install a newer one");
  }
  if (!facts.has(kDmaBufSupported)) {
    return absl::UnimplementedError(absl::StrCat("no dma-buf: CUDA device ", facts.ordinal,
                                                 " exports none; it takes NVIDIA's open kernel "
                                                 "module and Linux 5.12 with CONFIG_PCI_P2PDMA"));
  }
  return can_be_ordered(driver, facts);
}

absl::Status reachable_by_address(const Driver& driver, const DeviceFacts& facts, bool module) {
  if (!module) {
    return absl::UnavailableError(
        "no nvidia-peermem: that kernel module is not loaded (`modprobe nvidia-peermem`)");
  }
  if (driver.cuPointerSetAttribute == nullptr || !facts.has(kRdmaSupported)) {
    return absl::UnimplementedError(absl::StrCat("no nvidia-peermem: CUDA device ", facts.ordinal,
                                                 " does not let adapters access its memory"));
  }
  const absl::Status ordered = can_be_ordered(driver, facts);
  return ordered.ok()
             ? ordered
             : absl::Status(ordered.code(),
                            absl::StrCat("no nvidia-peermem: ",
                                         absl::StripPrefix(ordered.message(), "no dma-buf: ")));
}

bool peermem_loaded(const std::string& root) {
  for (const char* name : {"nvidia_peermem", "nv_peer_mem"}) {
    if (access(absl::StrCat(root, "/sys/module/", name).c_str(), F_OK) == 0) return true;
  }
  return false;
}

}  // namespace baton::gpudirect
