/* glibc 2.34 moved threads into libc and gave their functions a new version. Ask for the first one, which every glibc has:
   a wheel for manylinux_2_17 can then be compiled on a new system. auditwheel refuses it if another function is too new. */
#if defined __x86_64__
#define FIRST "GLIBC_2.2.5"
#elif defined __aarch64__
#define FIRST "GLIBC_2.17"
#endif
__asm__(".symver pthread_create,pthread_create@" FIRST);
__asm__(".symver pthread_join,pthread_join@" FIRST);
