// `baton-demo`: the demo alone, so that a fresh clone builds no more than what it runs. `baton
// demo` is the same.
#include "engine/demo/demo.h"

int main(int argc, char** argv) { return baton::engine::demo::demo_main(argc, argv); }
