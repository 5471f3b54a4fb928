// `baton-demo`: the demo alone, so that a fresh clone builds no more than what it runs. `baton
// demo` is the same.
#include <iostream>

#include "engine/demo/demo.h"
#include "transport/base/environment.h"

int main(int argc, char** argv) {
  if (const auto wrong = baton::base::wrong_environment(); !wrong.empty()) {
    for (const std::string& line : wrong) std::cerr << "baton-demo: " << line << "\n";
    return 2;
  }
  return baton::engine::demo::demo_main(argc, argv);
}
