// A library that calls itself UCX 1.9 and has nothing else.
extern "C" __attribute__((visibility("default"))) void ucp_get_version(unsigned* major,
                                                                       unsigned* minor,
                                                                       unsigned* release) {
  *major = 1;
  *minor = 9;
  *release = 3;
}
