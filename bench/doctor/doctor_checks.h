// The checks of `baton doctor`, by what they look at. Each appends to the list.
#pragma once

#include <string>
#include <vector>

#include "bench/doctor/doctor.h"

namespace baton::bench {

void check_rdma(const Json& info, std::vector<Check>& out);    // devices, ports, GIDs, access
void check_limits(const Json& info, std::vector<Check>& out);  // locked memory, cgroups, files
void check_memory(const Json& info, std::vector<Check>& out);  // huge pages
void check_kernel(const Json& info, std::vector<Check>& out);  // CMA, TCP
void check_gpus(const Json& info, std::vector<Check>& out);    // driver, peermem, dma-buf

}  // namespace baton::bench
