// The facts of CUDA devices as JSON.
#include "bench/doctor/info_cuda.h"

#include <string>

#include "absl/strings/str_format.h"
#include "gpudirect/facts.h"
#include "gpudirect/flush_policy.h"

namespace baton::bench {
namespace {

Json as_json(const gpudirect::Driver& driver, const gpudirect::DeviceFacts& facts, bool peermem) {
  Json out = {{"ordinal", facts.ordinal},
              {"name", facts.name},
              {"pci", facts.pci},
              {"memory_bytes", facts.memory_bytes}};
  for (size_t i = 0; i < facts.values.size(); ++i) {
    const auto& value = facts.values[i];
    out[gpudirect::kFactNames[i].name] = value.has_value() ? Json(*value) : Json();
  }
  const absl::Status reachable = gpudirect::reachable_by_adapters(driver, facts);
  const absl::Status by_address = gpudirect::reachable_by_address(driver, facts, peermem);
  const bool staged = !reachable.ok() && !by_address.ok();
  out["path"] = reachable.ok() ? "dma-buf" : staged ? "staged" : "nvidia-peermem";
  out["why_no_dma_buf"] = std::string(reachable.message());
  out["why_staged"] =
      staged ? absl::StrFormat("%s; %s", reachable.message(), by_address.message()) : "";
  out["writes_of_adapters"] = gpudirect::words(gpudirect::flush_policy(facts));
  return out;
}

}  // namespace

Json cuda_info(const absl::StatusOr<const gpudirect::Driver*>& driver, const std::string& root) {
  Json out = {{"driver", nullptr}, {"why", ""}, {"devices", Json::array()}};
  if (!driver.ok()) {
    out["why"] = std::string(driver.status().message());
    return out;
  }
  const int version = (*driver)->version;
  out["driver"] = absl::StrFormat("%d.%d", version / 1000, version % 1000 / 10);
  const bool peermem = gpudirect::peermem_loaded(root);
  int count = 0;
  absl::Status status =
      gpudirect::driver_status(**driver, (*driver)->cuDeviceGetCount(&count), "counting GPUs");
  for (int i = 0; i < count && status.ok(); ++i) {
    const auto facts = gpudirect::query_facts(**driver, i);
    if (facts.ok()) out["devices"].push_back(as_json(**driver, *facts, peermem));
    status = facts.status();
  }
  if (!status.ok()) out["why"] = std::string(status.message());
  return out;
}

}  // namespace baton::bench
