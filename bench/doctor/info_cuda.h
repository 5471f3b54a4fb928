// What the CUDA driver says of its devices.
#pragma once

#include "absl/status/statusor.h"
#include "bench/report/report.h"
#include "gpudirect/driver.h"

namespace baton::bench {

// {"driver","why","devices":[{"ordinal","name","pci","memory_bytes", and each fact by its name,
// "path","why_no_dma_buf","why_staged","writes_of_adapters"}]}. "path": "dma-buf" or
// "nvidia-peermem" where adapters can be given its memory, else "staged", and why. "driver" is the
// CUDA version, null where there is none ("why" says it then); a fact that the driver does not know
// is null. `driver`: gpudirect::machine_driver(). Sysfs lies below `root`.
Json cuda_info(const absl::StatusOr<const gpudirect::Driver*>& driver,
               const std::string& root = "");

}  // namespace baton::bench
