// The providers of this program: which can be used here, and why not.
#pragma once

#include "bench/report/report.h"

namespace baton::bench {

// Makes each provider and lets it listen, on loopback, for a moment:
// [{"name","usable","rank","detail"}], best rank first. `detail` holds devices and features, or the
// reason and the remedy. One that workers have on request only (UCX) is made in a child: it may end
// the process that loads it. Providers that Baton has and this program does not are listed too.
Json probe_providers();

}  // namespace baton::bench
