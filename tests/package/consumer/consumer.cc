// Uses an installed Baton: makes a worker and lists what it can send with.
#include <cstdio>

#include "transport/provider.h"
#include "transport/worker.h"

int main() {
  const auto key = baton::ClusterKey::from_bytes("sixteen bytes or more");
  const auto worker = baton::Worker::create({.name = "consumer", .key = *key});
  if (!worker.ok()) return std::fprintf(stderr, "%s\n", worker.status().ToString().c_str()), 1;
  for (const auto& [name, factory] : baton::registered_providers()) std::puts(name.c_str());
  return baton::registered_providers().empty() ? 1 : 0;
}
