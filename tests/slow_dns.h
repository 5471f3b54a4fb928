// A program whose DNS is slow about one name: `slow.example`, this host, is found when the test
// lets it be. For one source of a program: it defines the C library's getaddrinfo() in its place.
#pragma once

#include <dlfcn.h>
#include <netdb.h>

#include <cstring>
#include <semaphore>

namespace baton {

inline std::counting_semaphore<> dns_asked{0};     // a look-up has begun
inline std::counting_semaphore<> dns_answered{0};  // one more may end

}  // namespace baton

extern "C" int getaddrinfo(const char* node, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  using Real = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const Real real = reinterpret_cast<Real>(dlsym(RTLD_NEXT, "getaddrinfo"));
  if (node == nullptr || std::strcmp(node, "slow.example") != 0) {
    return real(node, service, hints, found);
  }
  baton::dns_asked.release();
  baton::dns_answered.acquire();
  return real("127.0.0.1", service, hints, found);
}
